"""What documents say about a loss, how often the words are right, and which method is taken."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coca_attention.models import METHODS
from coca_lab.evaluation.choice import GUESS, Choice, Margins, Read, loss_of
from coca_lab.intervals import DocumentScore

RESULTS = Path(__file__).parents[3] / "results" / "smollm2" / "perplexity.jsonl"
ENGINES = {name: row.engines for name, row in METHODS.items()} | {
    "yarn": ("Transformers", "vLLM"),
    "ntk": ("Transformers",),
}


def scores(nats, tokens=100):
    return [DocumentScore(f"book {i}", tokens * x, tokens) for i, x in enumerate(nats)]


def test_the_words_are_those_of_the_interval():
    base = scores([3.0, 3.2, 2.9, 3.1])
    assert str(loss_of(scores([3.001, 3.202, 2.899, 3.1]), base, 0.01)) == "no loss shown"
    assert str(loss_of(scores([3.2, 3.41, 3.09, 3.3]), base, 0.01)) == "loses"
    # A gain is no loss, and a loss below the margin is none that matters.
    assert loss_of(scores([2.5, 2.71, 2.4, 2.6]), base, 0.01).word == "no loss shown"
    assert loss_of(scores([x + 0.005 for x in (3.0, 3.2, 2.9, 3.1)]), base, 0.01).word == (
        "no loss shown"
    )
    wide = loss_of(scores([3.2, 3.0, 3.1, 2.9]), base, 0.01)
    assert wide.word == "cannot tell" and wide.needed > 100
    assert str(wide) == f"cannot tell with 4 documents, about {wide.needed:,} are needed"
    assert str(loss_of(base[:1], base[:1], 0.01)) == "cannot tell with 1 document"


def test_the_documents_that_are_needed_are_about_enough():
    generator = np.random.default_rng(0)
    base = scores(np.full(6, 3.0))
    few = loss_of(scores(3.0 + generator.normal(0, 0.02, 6)), base, 0.01)
    assert few.word == "cannot tell"
    # Of so many documents like these, most samples with the same mean can tell.
    words = []
    for _ in range(200):
        drawn = generator.normal(0, 1, few.needed)
        spread = (few.interval[1] - few.mean) / 2.5706 * math.sqrt(6)
        drawn = few.mean + spread * (drawn - drawn.mean()) / drawn.std(ddof=1)
        words.append(loss_of(scores(3 + drawn), scores(np.full(few.needed, 3.0)), 0.01).word)
    assert np.mean([word != "cannot tell" for word in words]) > 0.9


def measured_spread():
    """Nats by which YaRN and leaky distances differ between books at 12,288 tokens."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    at = {(r["method"], r["text"]): r["nats"] for r in rows if r["length"] == 12288}
    names = ("dynamic", "yarn", "leaky")
    return [
        np.array([at[name, text] - at["rerope", text] for text in range(8)]).std(ddof=1)
        for name in names
    ]


@pytest.mark.parametrize("documents", [3, 8, 20])
@pytest.mark.parametrize("tails", [None, 4], ids=["normal", "heavy tails"])
def test_two_percent_more_perplexity_is_rarely_called_lossless(documents, tails):
    generator = np.random.default_rng(documents)
    for spread in measured_spread():
        if tails is None:
            noise = generator.normal(0, spread, (1000, documents))
        else:
            noise = spread * math.sqrt(0.5) * generator.standard_t(tails, (1000, documents))
        base = scores(np.full(documents, 3.0), tokens=1024)
        margin = math.log1p(Margins().perplexity)
        words = [
            loss_of(scores(3.0 + math.log(1.02) + row, tokens=1024), base, margin).word
            for row in noise
        ]
        assert words.count("no loss shown") < 50
        # And it is not for want of ever saying anything.
        if documents == 20:
            assert words.count("loses") > 500


def needles(length, near, beyond=()):
    """Documents of a cell, each with a needle up to L = 4,096 tokens back, and one beyond."""
    documents = []
    for index, nats in enumerate(near):
        found = [{"distance": 100, "nats": 7 * nats}]
        if len(beyond):
            found.append({"distance": length - 100, "nats": 7 * beyond[index]})
        documents.append({"id": f"book {index}", "needles": found})
    return documents


def read(method, far, within=0.0, near=0.4, back=(0.4, 0.5, 0.4), whole=(3.0, 3.2, 2.9), short=0.0):
    """What a method reads: nats a digit beyond L, and what is lost within L and up to L back."""
    base = np.array([3.0, 3.2, 2.9])
    return Read(
        method=method,
        engines=ENGINES.get(method, ()),
        length=4096,
        perplexity={
            12288: scores(whole),
            4096: scores(base + within),
            512: scores(base + short),
        },
        needles={
            4096: needles(4096, (near, near + 0.1, near)),
            8192: needles(8192, back, far),
            12288: needles(12288, back, np.array(far) + 0.2),
        },
    )


ALONE = read("last 4,096 tokens alone", [2.3, 2.4, 2.3])


def choice_of(base, *others):
    return Choice(base=base, alone=ALONE, others=others)


def test_the_best_beyond_is_taken_among_those_that_show_no_loss():
    base = read("base", [2.2, 2.4, 2.3])
    yarn, shifted = read("yarn", [1.2, 1.3, 1.1]), read("shifted", [0.6, 0.7, 0.5])
    choice = choice_of(base, yarn, shifted)
    assert choice.taken is choice.best is shifted
    assert choice.reason == (
        "shifted is taken: it gives a digit beyond L a probability of 50% (0.70 nats), the best "
        "of the methods with no loss shown. The last 4,096 tokens alone give 9% (2.43 nats)."
    )
    # With a loss it is not.
    losing = read("shifted", [0.6, 0.7, 0.5], within=0.05)
    assert losing.verdict(base, Margins()) == "loses 5.1% of perplexity at 4,096"
    one = choice_of(base, yarn, losing)
    assert one.taken is yarn and ", the only method with no loss shown. The last " in one.reason
    alone = choice_of(base, yarn)
    assert ", and no loss is shown; it is the only method compared. The last" in alone.reason
    # In short texts, too.
    both = read("shifted", [0.6, 0.7, 0.5], within=0.05, short=0.04)
    said = both.verdict(base, Margins())
    assert said == "loses 4.1% of perplexity at 512, 5.1% of perplexity at 4,096"
    losing = read("shifted", [0.6, 0.7, 0.5], short=0.04)
    assert losing.word(base, Margins()) == "loses"
    none = choice_of(base, losing)
    assert none.taken is None
    assert none.reason == 'No method has "no loss shown" within L, so none is taken.'


def test_methods_that_the_documents_do_not_part_are_decided_by_engines():
    base = read("base", [2.2, 2.4, 2.3])
    yarn, shifted = read("yarn", [0.7, 0.5, 0.65]), read("shifted", [0.6, 0.7, 0.5])
    choice = choice_of(base, shifted, yarn)
    assert choice.best is shifted and choice.taken is yarn
    assert "shifted gives 50% (0.70 nats), but the documents do" in choice.reason


def test_a_model_that_finds_nothing_is_said_to_say_nothing():
    base = read("base", [2.4, 2.5, 2.6], near=2.4)
    choice = choice_of(base, read("yarn", [2.45, 2.55, 2.65], near=2.4))
    assert (
        f"a guess has {GUESS:.2f}. So needles cannot compare methods for it." in choice.warnings[0]
    )
    assert choice.taken is None and choice.reason == (
        "The documents do not show that a method finds more beyond L than a guess, so none is "
        "taken: yarn, the best of those with no loss shown, gives a digit there a probability of "
        "7% (2.65 nats), a guess has 10%."
    )
    # Not even one that is the best by an interval.
    sure = replace(read("leaky", [2.40, 2.50, 2.60], near=2.4), engines=())
    assert choice_of(base, sure, *choice.others).taken is None
    assert not choice_of(read("base", [2.4, 2.5, 2.6]), read("yarn", [1.0, 1.1, 1.2])).warnings


def test_what_longer_texts_cost_up_to_the_training_length_back_is_said():
    base = read("base", [2.4, 2.5, 2.6])
    (said,) = choice_of(base, read("yarn", [1.0, 1.1, 1.2], back=(0.6, 0.7, 0.65))).warnings
    assert said == (
        "In longer texts, numbers up to L back have 0.22 nats a digit more with yarn than with the "
        "last 4,096 tokens alone."
    )
    level = read("yarn", [1.0, 1.1, 1.2], back=(0.3, 0.7, 0.65), whole=(3.1, 3.1, 2.9))
    assert not choice_of(base, level).warnings
    # Of perplexity, beside the model as it is, too, which may be worse than its last tokens alone.
    yarn = read("yarn", [1.0, 1.1, 1.2], whole=(3.1, 3.31, 2.99))
    higher = "higher with yarn than that of the"
    as_it_is, alone = choice_of(base, yarn).warnings
    assert as_it_is == f"The perplexity of the longest texts is 10.5% {higher} model as it is."
    assert alone == as_it_is.replace("model as it is", "last 4,096 tokens alone")
    worse = replace(base, perplexity=base.perplexity | {12288: scores([5.0, 5.1, 5.2])})
    assert choice_of(worse, yarn).warnings == [alone]
    better = replace(base, perplexity=base.perplexity | {12288: scores([2.95, 3.16, 2.84])})
    level = read("yarn", [1.0, 1.1, 1.2], whole=(3.0, 3.2, 2.9))
    (said,) = choice_of(better, level).warnings
    assert said == f"The perplexity of the longest texts is 5.1% {higher} model as it is."


def test_a_model_that_needs_no_method_gets_none():
    base = read("base", [0.9, 1.0, 1.1])
    choice = choice_of(base, read("yarn", [0.8, 1.0, 1.1]))
    assert choice.taken is None and not choice.warnings
    assert choice.reason == (
        "The documents do not show that beyond L a method is better than the model as it is, so "
        "none is taken: yarn, the best of those with no loss shown, gives a digit there a "
        "probability of 34% (1.07 nats); the model as it is 33% (1.10 nats), and it may have been "
        "made for longer texts."
    )
    better = choice_of(base, read("yarn", [0.7, 0.8, 0.9]))
    assert better.taken is not None and better.taken.method == "yarn"


def test_what_runs_without_this_package_is_taken_before_what_needs_it():
    base = read("base", [2.2, 2.4, 2.3])
    limited = read("limited", [0.6, 0.7, 0.5])
    dynamic = read("dynamic", [0.7, 0.5, 0.65])
    assert choice_of(base, limited, dynamic).taken is dynamic
