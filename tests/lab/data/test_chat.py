"""Chat templates as models have them, and broken ones: by generate and by RULER's tasks."""

import copy
import json
import shutil

import pytest

from coca_attention.errors import UserError
from coca_lab.data.chat import chat_frame, chat_text
from coca_lab.data.ruler import ask_for_ruler
from commands import run

STRING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}</>{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{{ m.content[0].text }}{% endif %}{% endfor %}"
)
THINKING = STRING + (
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% elif enable_thinking is defined %}<think>\n{% else %}<think>\n\n{% endif %}"
)
BROKEN = [
    ("{{ raise_exception('only system messages') }}", "cannot be used: only system messages"),
    ("{% for m in messages %}{{ m.content }}", "cannot be used: Unexpected end of template"),
    ("{{ messages[7].content }}", "cannot be used: .*has no element 7"),
    ("{{ messages[0].content + 1 }}", "cannot be used: .*concatenate"),
    ("CONTENT", "cannot be used: it leaves out what the user says"),
    (
        "{{ messages[0].content }}{{ messages[0].content }}",
        "cannot be used: it repeats what the user says",
    ),
]
CHANGED = [
    "{{ messages[0].content | tojson }}",
    "{{ messages[0].content[:20] }}",
]


@pytest.fixture
def template(tokenizer):
    """A tokenizer with a chat template."""

    def made(text):
        other = copy.deepcopy(tokenizer)
        other.chat_template = text
        return other

    return made


@pytest.mark.parametrize(
    ("text", "before", "behind"),
    [
        (STRING, "<user>", "</>"),
        (PARTS, "<user>", "</>"),
        (EITHER, "", ""),
        (f"CONTENT{STRING}CONTENT", "CONTENT<user>", "</>CONTENT"),
    ],
)
def test_what_the_user_says_is_in_the_prompt_once(template, text, before, behind):
    tokenizer = template(text)
    assert chat_frame(tokenizer) == (before, behind)
    for said in ("alpha1", "CONTENT", "two\nlines"):
        assert chat_text(tokenizer, said) == f"{before}{said}{behind}"
    (prompt,) = ask_for_ruler(tokenizer, "niah_single_1", 1024, [0], chat=True)
    assert prompt.text.startswith(f"{before}A special magic number")
    assert f"mentioned in the provided text?{behind} The special magic" in prompt.text
    assert tokenizer(prompt.text, add_special_tokens=False)["input_ids"] == prompt.ids


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_template_that_cannot_be_used_is_refused(template, text, message):
    for use in (lambda each: chat_text(each, "alpha1"), chat_frame):
        with pytest.raises(UserError, match=message) as raised:
            use(template(text))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", CHANGED)
def test_a_prompt_whose_text_a_template_changes_is_refused(template, text):
    with pytest.raises(UserError, match="template changes what the user says"):
        ask_for_ruler(template(text), "niah_single_1", 1024, [0], chat=True)
    assert "alpha1" in chat_text(template(text), "alpha1")


def test_thinking_is_set_where_the_template_takes_it(template):
    ends = {"default": "<think>\n\n", "on": "<think>\n", "off": "<think></think>"}
    for thinking, end in ends.items():
        assert chat_frame(template(THINKING), thinking)[1] == f"</>{end}"
        (prompt,) = ask_for_ruler(
            template(THINKING), "niah_single_1", 1024, [0], chat=True, thinking=thinking
        )
        assert f"text?</>{end} The special magic" in prompt.text
    with pytest.raises(UserError, match="no enable_thinking to set"):
        chat_text(template(STRING), "a", "off")


def test_the_commands_say_in_a_line_what_a_template_does(
    capsys, model_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, "model")
    generate = ["generate", "model", "alpha1", "--max-new-tokens", "2", "--chat"]
    ruler = ["eval", "ruler", "model", "--chat", "--kinds", "niah_single_1"]
    ruler += ["--lengths", "1024", "--samples", "1", "--output", "ruler.json"]
    for text, _ in BROKEN:
        (tmp_path / "model" / "chat_template.jinja").write_text(text)
        for words in (generate, ruler):
            code, _, err = run(capsys, *words)
            assert code == 2 and "chat template cannot be used: " in err, err
            assert err.count("coca: ") == 1
    (tmp_path / "model" / "chat_template.jinja").write_text(THINKING)
    code, _, err = run(capsys, *ruler)
    assert code == 0 and "what is scored is what the model thinks: set --thinking to off" in err
    assert run(capsys, *generate, "--thinking", "off")[0] == 0
    code, _, err = run(capsys, *ruler, "--thinking", "off")
    assert code == 0 and "thinks" not in err
    (cell,) = json.loads((tmp_path / "ruler.json").read_text())["results"]
    assert cell["thinking"] == "off"
    for words in (generate[:-1], [word for word in ruler if word != "--chat"]):
        code, _, err = run(capsys, *words, "--thinking", "off")
        assert code == 2 and "set --chat" in err
