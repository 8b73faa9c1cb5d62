"""Commands that run studies, and list the project's own files."""

from collections.abc import Collection

from coca_attention.errors import UserError, did_you_mean
from coca_lab.arguments import SettingsParser
from coca_lab.cli.console import Progress, parse, parse_file, print_table
from coca_lab.engine import RAY_HELP, take_ray
from coca_lab.report import printed_tables, read_results
from coca_lab.shipped import KINDS, first_sentence, shipped
from coca_lab.studies.run import REPORT_FILE
from coca_lab.studies.run import run_study as run
from coca_lab.studies.study import load_study, study_parser

WORKERS = (
    "Processes that train and evaluate a model each; 0: none but this one. By default one per \
core, or one if there is a GPU."
)
COMMANDS = {
    "recipe": "coca train NAME",
    "study": "coca study NAME",
    "suite": "coca eval suite NAME",
}


def _study_parser(shown: Collection[str] = ()) -> SettingsParser:
    parser = study_parser(shown)
    parser.add_argument("--ray", help=RAY_HELP)
    parser.add_argument("--workers", help=WORKERS)
    return parser


def run_study(words: list[str]) -> None:
    """Train and evaluate the models of a study, and draw a page; resumes when run again."""
    usage = "coca study NAME|STUDY.yaml [--workers N] [--ray [ADDRESS]] [--training.steps 100 …]"
    words, ray = take_ray(words)
    name, words, output = parse_file(words, run_study, _study_parser, "study", usage)
    options = SettingsParser("coca study", add_help=False)
    options.add_argument("--workers", type=int)
    found, words = options.parse_known_args(words)
    study = load_study(name, words)
    with Progress() as advance:
        results = run(study, output, progress=advance, ray=ray, workers=found.workers)
    for table in printed_tables(read_results([results])[0]["results"]):
        print_table(*table)
    print(f"Results: {results}")
    print(f"Report:  {output / REPORT_FILE}")


def run_recipes(words: list[str]) -> None:
    """List the project's recipes, studies and suites, or print one to change it."""
    (name,) = parse("coca recipes", run_recipes, words, [], ["recipe?"])
    if name is None:
        for kind, folder in KINDS.items():
            print(f"{folder} ({COMMANDS[kind]}):")
            for each, path in shipped(kind).items():
                print(f"  {each:<29} {first_sentence(path)}")
        return
    kind, _, rest = name.rpartition("/")
    for each, folder in KINDS.items():
        if kind in ("", folder) and rest in shipped(each):
            print(shipped(each)[rest].read_text(encoding="utf-8"), end="")
            return
    known = [*shipped("recipe"), *shipped("study"), *shipped("suite")]
    raise UserError(f"no recipe, study or suite is called {name}{did_you_mean(rest, known)}")
