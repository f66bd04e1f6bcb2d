"""Tasks whose answers are checked by rules: options, instructions, structured output."""

import json

import pytest

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind, Outcome
from prorl_hpc.tasks import constraints, instructions, stem, structured
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.registry import make_task


def make(tmp_path, kind, rows):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return make_task("t", TaskConfig(kind=kind, data=str(path), validation_size=1), 0)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("so the answer is (d).", "D"),
        ("<answer>A</answer>", "A"),
        ("B.", "B"),
        ("<think>\\boxed{A}</think>Answer: B", "B"),
        ("A thing that I can't tell", None),
    ],
)
def test_letters(response, letter):
    assert stem.letter_in(response) == letter


def test_options_take_letters_positions_and_texts(tmp_path):
    rows = [
        {"question": f"{i}?", "options": ["one", "two"], "answer": answer}
        for i, answer in enumerate(["B", 1, "two"])
    ]
    task = make(tmp_path, "stem", rows)
    for index in range(task.size(Kind.train)):
        instance = task.instance(index, kind=Kind.train)
        assert instance.answer == "B"
        assert "B. two" in instance.messages[-1].content
        assert task.score(instance, task.demonstration(instance)).reward == 1.0
        assert task.score(instance, "\\boxed{A}").reward == 0.0
        assert task.score(instance, "who knows").outcome is Outcome.invalid
    with pytest.raises(TaskError, match="line 1: answer='C'"):
        make(tmp_path, "stem", [{"question": "?", "options": ["x", "y"], "answer": "C"}])


@pytest.mark.parametrize(
    ("name", "arguments", "good", "bad"),
    [
        ("keywords:existence", {"keywords": ["tea"]}, "Tea!", "team"),
        ("keywords:forbidden_words", {"forbidden_words": ["tea"]}, "team", "tea"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"},
         "a and a", "a"),
        ("keywords:letter_frequency",
         {"letter": "e", "let_frequency": 2, "let_relation": "less than"}, "me", "meE"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"},
         "it's well-made stuff", "two words"),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"},
         "One.", "One. Two!"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
        ("length_constraints:nth_paragraph_first_word",
         {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
         "So.\n\nThen, this.", "So.\n\nAnd then."),
        ("detectable_format:multiple_sections",
         {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1\na\nSECTION 2\nb",
         "SECTION 1\na"),
        ("detectable_format:constrained_response", {}, "I think: My answer is no.", "No."),
        ("change_case:capital_word_frequency",
         {"capital_frequency": 2, "capital_relation": "at least"}, "THE END", "The END"),
        ("language:response_language", {"language": "de"}, "Das ist ein guter Satz.",
         "This is a good sentence."),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a"),
        ("detectable_format:title", {}, "<<Hello>> x", "Hello"),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a}"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
         "*a* **b**", "*a*"),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[name]", "name"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP.S. y", "x"),
        ("change_case:english_lowercase", {}, "abc 1", "Abc"),
        ("change_case:english_capital", {}, "ABC", "ABc"),
        ("punctuation:no_comma", {}, "a b", "a, b"),
        ("startend:quotation", {}, '"x"', '"x'),
        ("startend:end_checker", {"end_phrase": "Bye."}, "so: bye.", "bye. so"),
        ("combination:two_responses", {}, "a ****** b", "a"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say x"}, "Say x\nx", "x"),
    ],
)  # fmt: skip
def test_every_rule(name, arguments, good, bad):
    assert constraints.holds(good, name, arguments)
    assert not constraints.holds(bad, name, arguments)


def test_instructions_reward_the_fraction_kept(tmp_path):
    row = {
        "prompt": "Write.",
        "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
        "kwargs": [{}, {"unused": None}],
    }
    task = make(tmp_path, "instructions", [row, row | {"prompt": "Write more."}])
    instance = task.instance(0, kind=Kind.train)
    assert task.score(instance, "Fine").reward == 0.5
    assert task.score(instance, "<think>A, B</think>fine").reward == 1.0
    assert instructions.check(instance.answer, "<think>").outcome is Outcome.invalid
    with pytest.raises(TaskError, match="did you mean 'punctuation:no_comma'"):
        make(tmp_path, "instructions", [row | {"instruction_id_list": ["punctuation:no_coma", ""]}])
    unknown = row | {"instruction_id_list": ["language:response_language"], "kwargs": [{}]}
    with pytest.raises(TaskError, match="language"):
        make(tmp_path, "instructions", [unknown])
    with pytest.raises(TaskError, match="language='xx'; choose of"):
        make(tmp_path, "instructions", [unknown | {"kwargs": [{"language": "xx"}]}])
    with pytest.raises(TaskError, match="give one for each"):
        make(tmp_path, "instructions", [row | {"kwargs": [{}]}])


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"name": "Ada", "age": 3}, True),
        ({"name": "Ada", "age": 3.0, "tags": ["a", "b"]}, True),
        ({"name": "ada", "age": 3}, False),
        ({"name": "Ada", "age": True}, False),
        ({"name": "Ada", "age": -1}, False),
        ({"name": "Ada"}, False),
        ({"name": "Ada", "age": 3, "more": 1}, False),
        ({"name": "Ada", "age": 3, "tags": ["c"]}, False),
        ({"name": "Ada", "age": 3, "tags": ["a", "a", "a"]}, False),
        ([], False),
    ],
)
def test_schemas(value, fits):
    assert structured.fits_schema(value, SCHEMA) is fits


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [{"type": "string"}, {"minimum": 3, "type": "number"}]}, 3, 2),
        ({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {
            "$ref": "#/$defs/tree"}}}}, [[], [[]]], [[1]]),
        ({"$ref": "#/definitions/n", "definitions": {"n": {"type": "null"}},
          "$schema": "http://json-schema.org/draft-07/schema#"}, None, 0),
        ({"$id": "urn:x", "properties": {"a": {"$ref": "urn:x#/$defs/n"}},
          "$defs": {"n": {"const": 1}}}, {"a": 1.0}, {"a": True}),
        ({"format": "date"}, "2026-02-28", "2026-02-30"),
        ({"multipleOf": 0.5}, 1.5, 1.6),
        ({"uniqueItems": True}, [1, True], [1, 1.0]),
    ],
)  # fmt: skip
def test_all_of_json_schema(schema, good, bad):
    structured.check_schema(schema)
    assert structured.fits_schema(good, schema)
    assert not structured.fits_schema(bad, schema)


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ([], "isn't an object"),
        ({"type": "text"}, r"schema at \$.type: 'text'"),
        ({"pattern": "("}, "schema at .*pattern"),
        ({"$ref": "#/$defs/none"}, "isn't in the schema itself"),
        ({"items": {"$ref": "https://example.org/a.json"}}, "isn't in the schema itself"),
        ({"$schema": "https://example.org/none"}, "no known version"),
    ],
)
def test_what_is_no_schema_is_refused(schema, complaint):
    with pytest.raises(ValueError, match=complaint):
        structured.check_schema(schema)


@pytest.mark.parametrize("text", ["NaN", "[1e999]", "-Infinity", "[" * 100_000, "1" * 5000])
def test_what_is_no_json_is_invalid(text):
    wanted = {"schema": {"multipleOf": 0.1}}
    assert structured.check(wanted, text).outcome is Outcome.invalid
    assert not constraints.holds(text, "detectable_format:json_format", {})


def test_structured_output_is_scored_by_field(tmp_path):
    row = {"prompt": "Who?", "schema": SCHEMA, "answer": {"name": "Ada", "age": 3}}
    task = make(tmp_path, "structured", [row, row | {"prompt": "And who?"}])
    instance = task.instance(0, kind=Kind.train)
    assert task.score(instance, task.demonstration(instance)).reward == 1.0
    assert task.score(instance, '```json\n{"name": "Ada", "age": 4}\n```').reward == 0.5
    assert task.score(instance, '{"name": "Ada"}').reward == 0.0
    assert task.score(instance, "Ada").outcome is Outcome.invalid
    assert task.score(instance, '{"name": "Ada", "age": 3.0}').reward == 1.0
    with pytest.raises(TaskError, match=r"line 1: schema at .*oneOf"):
        make(tmp_path, "structured", [row | {"schema": {"oneOf": []}}])
    with pytest.raises(TaskError, match="doesn't fit its own schema"):
        make(tmp_path, "structured", [row | {"answer": {}}])
