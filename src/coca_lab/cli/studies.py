"""Commands that run studies, and list the project's own files."""

from coca_attention.errors import UserError, did_you_mean
from coca_lab.cli.console import RAY, Progress, parse, parse_file, print_table
from coca_lab.report import printed_tables, read_results
from coca_lab.shipped import KINDS, first_sentence, shipped
from coca_lab.studies.run import REPORT_FILE
from coca_lab.studies.run import run_study as run
from coca_lab.studies.study import load_study, study_parser

WORKERS = (
    "Processes that train and evaluate a model each; 0: none but this one. By default one per "
    "core, or one if there is a GPU."
)
COMMANDS = {
    "recipe": "coca train NAME",
    "study": "coca study NAME",
    "suite": "coca eval suite NAME",
}


def run_study(words: list[str]) -> None:
    """Train and evaluate the models of a study, and draw a page; resumes when run again."""
    usage = "coca study NAME|STUDY.yaml [--workers N] [--ray [ADDRESS]] [--training.steps 100 …]"
    options = {**RAY, "--workers": {"type": int, "help": WORKERS}}
    name, overrides, chosen = parse_file(
        words, run_study, study_parser, "study", usage, options=options
    )
    study = load_study(name, overrides)
    with Progress() as advance:
        results = run(
            study, chosen.output, progress=advance, ray=chosen.ray, workers=chosen.workers
        )
    for table in printed_tables(read_results([results])[0]["results"]):
        print_table(*table)
    print(f"Results: {results}")
    print(f"Report:  {chosen.output / REPORT_FILE}")


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
