"""Needles by log probability: their texts, their figures, and models whose answers are known."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coca_attention.errors import UserError
from coca_lab.data import Document, train_tokenizer
from coca_lab.data.needle_texts import DIGITS, hide_needles
from coca_lab.data.ruler import NEEDLE, word_lists
from coca_lab.evaluation import MethodSettings, Model, evaluate
from coca_lab.evaluation.needles import NEEDLES_TASK, NeedleSettings, figures, scores_of
from coca_lab.intervals import differences, nats_interval
from commands import run
from conftest import some_text


@pytest.fixture(scope="module", params=[True, False], ids=["digits alone", "digits together"])
def words(request):
    """A tokenizer of words and of the task's line."""
    adjectives, nouns, _ = word_lists()
    lines = [
        NEEDLE.format(kind="numbers", key=f"{a}-{n}", value=str(1234567 + 7919 * i))
        for i, (a, n) in enumerate(zip(adjectives[:40], nouns[:40], strict=False))
    ]
    texts = [Document("a", some_text(3000)), Document("b", "\n".join(lines * 20))]
    return train_tokenizer(texts, 700, split_digits=request.param)


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """Three documents in a file."""
    path = tmp_path_factory.mktemp("books") / "books.jsonl"
    lines = [
        json.dumps({"id": f"book {n}", "text": some_text(6000 + n)[n:], "x": n}) for n in range(3)
    ]
    path.write_text("\n".join(lines))
    return path


def test_a_text_has_every_needle_twice_at_the_distance_it_says(words):
    document = words(some_text(6000), add_special_tokens=False)["input_ids"]
    text = hide_needles(words, document, 900, 6, seed=[1, 2])
    assert len(text.ids) == 900
    numbers = set()
    for needle in text.needles:
        answer = text.ids[needle.first : needle.stop]
        number = words.decode(answer).strip()
        assert len(number) == DIGITS and number.isdigit()
        hidden = text.ids[needle.first - needle.distance : needle.stop - needle.distance]
        assert hidden == answer
        # The whole line stands there, and once more as question and answer.
        assert words.decode(text.ids).count(f"is: {number}.") == 2
        numbers.add(number)
    assert len(numbers) == 6
    # The rest is the document, in order.
    written = words.decode(text.ids)
    line = r"\nOne of the special magic numbers for \S+ is: \d{7}\.\n"
    assert words.decode(document).startswith(re.sub(line, "", written))


def test_places_cover_the_text_and_the_order_of_questions_is_not_theirs(words):
    document = words(some_text(30000), add_special_tokens=False)["input_ids"][:6000]
    text = hide_needles(words, document, 6000, 8, seed=[0])
    places = [needle.first - needle.distance for needle in text.needles]
    assert places != sorted(places)
    parts = sorted(place * 8 // 6000 for place in places)
    assert parts[0] == 0 and parts[-1] >= 5 and len(set(parts)) >= 6


def test_a_text_without_room_is_refused(words):
    document = words(some_text(3000), add_special_tokens=False)["input_ids"]
    with pytest.raises(
        UserError, match=r"100 tokens has no room for 10 needles .* hide fewer \(`count`"
    ):
        hide_needles(words, document, 100, 10, seed=[0])


class Near(LlamaForCausalLM):
    """Says with a logit of ``sure`` what came after the same tokens at most ``reach`` back."""

    reach, sure = 10**9, 30.0

    def forward(self, input_ids=None, logits_to_keep=0, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        logits = torch.zeros_like(output.logits)
        for row, ids in enumerate(input_ids.tolist()):
            for index in range(8, len(ids)):
                context = ids[index - 7 : index + 1]
                for other in range(index - 1, max(7, index - self.reach), -1):
                    if ids[other - 7 : other + 1] == context:
                        logits[row, index, ids[other + 1]] = self.sure
                        break
        output.logits = logits[:, -logits_to_keep:] if logits_to_keep else logits
        return output


def small(cls, words):
    """A Llama for the tokenizer."""
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=300,
    )  # fmt: skip
    return cls(config).eval()


def test_a_model_that_sees_so_far_finds_the_needles_up_to_there(words, books):
    module = small(Near, words)
    module.reach = 400
    settings = NeedleSettings(source=str(books), lengths=[800], count=4, near=400)
    (cell,) = evaluate(NEEDLES_TASK, Model(module, words), settings)
    near, beyond = cell["ranges"]["near"], cell["ranges"]["beyond"]
    assert near["needles"] + beyond["needles"] == cell["needles"] == 12
    assert near["needles"] > 0 and beyond["needles"] > 0
    assert near["found"] == near["needles"] and beyond["found"] == 0
    assert near["nats"] < 1e-6
    for document in cell["documents"]:
        for needle in document["needles"]:
            assert needle["found"] == (needle["distance"] <= 400)


def test_the_last_tokens_alone_find_what_they_have(words, books):
    module = small(Near, words)
    settings = NeedleSettings(
        source=str(books), lengths=[300, 800], count=4, attend_last=500, near=500
    )
    short, whole, last = evaluate(NEEDLES_TASK, Model(module, words), settings)
    assert [cell["length"] for cell in (short, whole, last)] == [300, 800, 800]
    assert [cell["scaling"] for cell in (whole, last)] == ["none", "last 500 tokens alone"]
    assert whole["text"] == last["text"]  # so that reports show them side by side
    assert whole["found"] == 12
    found = 0
    for index, (all_read, cut) in enumerate(
        zip(whole["documents"], last["documents"], strict=True)
    ):
        document = words(json.loads(books.read_text().splitlines()[index])["text"])["input_ids"]
        text = hide_needles(words, document, 800, 4, seed=[0, 800, index])
        for place, needle, same in zip(
            text.needles, cut["needles"], all_read["needles"], strict=True
        ):
            # With the tokens of the line before it, by which this model knows the number.
            has_it = place.first - place.distance - 8 >= 800 - 500
            assert needle["distance"] == same["distance"] == place.distance
            assert needle["found"] == has_it
            found += has_it
    assert 0 < found < 12
    # With a method, it is the same reading of the same model, for which nothing is computed again.
    yarn = evaluate(NEEDLES_TASK, Model(module, words), settings, MethodSettings("yarn", 2.0))
    assert yarn[-1]["documents"] == last["documents"]
    with pytest.raises(UserError, match=r"answers take \d+ tokens, the last 20 are too few"):
        evaluate(NEEDLES_TASK, Model(module, words), replace(settings, attend_last=20))


def test_nats_are_those_of_the_whole_logits(words, books):
    torch.manual_seed(0)
    module = small(LlamaForCausalLM, words)
    settings = NeedleSettings(source=str(books), lengths=[400, 500], count=3, max_documents=2)
    cells = evaluate(NEEDLES_TASK, Model(module, words), settings)
    assert [cell["length"] for cell in cells] == [400, 500]
    document = words(json.loads(books.read_text().splitlines()[1])["text"])["input_ids"]
    text = hide_needles(words, document, 500, 3, seed=[0, 500, 1])
    with torch.no_grad():
        logits = module.double()(torch.tensor([text.ids])).logits[0].log_softmax(-1)
    assert cells[1]["documents"][1]["id"] == "book 1"
    for needle, said in zip(text.needles, cells[1]["documents"][1]["needles"], strict=True):
        each = [
            -logits[index - 1, text.ids[index]].item() for index in range(needle.first, needle.stop)
        ]
        assert said["nats"] == pytest.approx(sum(each), rel=1e-5)
        assert said["distance"] == needle.distance
    total = sum(needle["nats"] for d in cells[1]["documents"] for needle in d["needles"])
    assert cells[1]["nats"] == pytest.approx(total / (6 * DIGITS))


def test_figures_part_near_and_far_and_pair_documents():
    def document(name, *nats):
        needles = [
            {"distance": 100 * (n + 1), "nats": x, "found": x is not None and x < 1}
            for n, x in enumerate(nats)
        ]
        return {"id": name, "needles": needles}

    first = [document("a", 0.7, 7.0), document("b", 1.4, 14.0)]
    assert figures(first, 100) == {
        "nats": pytest.approx(0.15),
        "ci95": pytest.approx([0.15 - 12.7062 * 0.0707107, 0.15 + 12.7062 * 0.0707107], rel=1e-4),
        "found": 1,
        "needles": 2,
    }
    assert figures(first, 100, beyond=True)["nats"] == pytest.approx(1.5)
    assert figures(first)["needles"] == 4
    # A constant difference has no spread, however unlike the documents are.
    second = [document("a", 1.4, 7.7), document("b", 2.1, 14.7)]
    pairs = differences(scores_of(second), scores_of(first))
    assert nats_interval(pairs) == pytest.approx((0.1, 0.1))
    overflowed = figures([document("a", None), document("b", 1.0)])
    assert overflowed["nats"] is None and overflowed["ci95"] is None
    assert figures(first, 1000, beyond=True)["nats"] is None


def test_the_command_writes_a_table_near_and_far(capsys, tmp_path, words, books):
    folder = tmp_path / "model"
    small(LlamaForCausalLM, words).save_pretrained(folder)
    words.save_pretrained(folder)
    command = ["eval", "needles", folder, "--source", books, "--lengths", "400,700"]
    code, out, err = run(capsys, *command, "--count", "4", "--output", tmp_path / "n.json")
    assert code == 0, err
    assert "up to 300 tokens back" in out and "farther back than 300 tokens" in out
    cells = json.loads((tmp_path / "n.json").read_text())["results"]
    assert [cell["length"] for cell in cells] == [400, 700]
    # Of an extended model L is what it was extended from.
    assert run(capsys, "extend", folder, tmp_path / "long", "--method", "dynamic")[0] == 0
    command[2] = tmp_path / "long"
    code, out, err = run(capsys, *command, "--count", "4", "--output", tmp_path / "long.json")
    assert code == 0 and "farther back than 300 tokens" in out, err
    # Where a model does not say how long its training texts were, nothing parts near from far.
    for cell in cells:
        cell |= {"near": None, "ranges": {}}
    (tmp_path / "all.json").write_text(json.dumps({"results": cells}))
    assert run(capsys, "report", tmp_path / "all.json", "--output", tmp_path / "all.html")[0] == 0
    code, out, err = run(capsys, "report", tmp_path / "n.json", "--output", tmp_path / "n.html")
    assert code == 0, err
    assert "nats a digit" in (tmp_path / "n.html").read_text()
