"""Rules of writing that a program can check, by name. Pure functions on text.

Names and arguments are those of IFEval (arXiv 2311.07911), so that its data sets can be used; each
check is written here anew.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from prorl_hpc.tasks.answers import read_json

Check = Callable[..., bool]
"""(text, **arguments) -> whether the text keeps the rule."""


def _compare(count: int, bound: int, relation: str) -> bool:
    if relation == "less than":
        return count < bound
    if relation == "at least":
        return count >= bound
    raise ValueError(f"relation={relation!r}; choose 'less than' or 'at least'")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text)


def _count(text: str, keyword: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", text, re.IGNORECASE))


def exist(text: str, *, keywords: list[str]) -> bool:
    return all(_count(text, keyword) for keyword in keywords)


def forbidden(text: str, *, forbidden_words: list[str]) -> bool:
    return not any(_count(text, word) for word in forbidden_words)


def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_count(text, keyword), frequency, relation)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.lower()), let_frequency, let_relation)


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    return _compare(len(_words(text)), num_words, relation)


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if _words(s)]
    return _compare(len(sentences), num_sentences, relation)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    return len([part for part in parts if part.strip()]) == num_paragraphs


def first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Here an empty line parts paragraphs; the others count `***`."""
    if not 1 <= nth_paragraph <= num_paragraphs:
        raise ValueError(f"nth_paragraph={nth_paragraph} isn't one of {num_paragraphs}")
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs:
        return False
    words = _words(paragraphs[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.strip().lower()


def number_bullets(text: str, *, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*[*-]\s+\S", text, re.MULTILINE)) == num_bullets


def title(text: str) -> bool:
    return any(found.strip() for found in re.findall(r"<<([^<>\n]+)>>", text))


def json_format(text: str) -> bool:
    body = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        read_json(body)
    except ValueError:
        return False
    return True


def highlighted(text: str, *, num_highlights: int) -> bool:
    found = re.findall(r"\*\*[^*\n]+\*\*|(?<!\*)\*[^*\s][^*\n]*\*(?!\*)", text)
    return len(found) >= num_highlights


def sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Each section begins with the given word and a number: `SECTION 1`."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def constrained_response(text: str) -> bool:
    return any(f"my answer is {word}." in text.lower() for word in ("yes", "no", "maybe"))


def placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    return re.search(rf"^\s*{re.escape(postscript_marker)}", text, re.MULTILINE) is not None


def lowercase(text: str) -> bool:
    return text == text.lower() and any(c.isalpha() for c in text)


def uppercase(text: str) -> bool:
    return text == text.upper() and any(c.isalpha() for c in text)


def capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Words without a lower-case letter."""
    return _compare(sum(w.isupper() for w in _words(text)), capital_frequency, capital_relation)


def response_language(text: str, *, language: str) -> bool:
    """`language` is a code of ISO 639. Raises ValueError for one that can't be told."""
    identifier = _language_identifier()
    if language not in identifier.labels:
        raise ValueError(f"language={language!r}; choose of {', '.join(sorted(identifier.labels))}")
    return bool(identifier.classify(text)[0] == language)


@cache
def _language_identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    body = text.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


def end_checker(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******") if part.strip()]
    return len(parts) == 2 and parts[0] != parts[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


CHECKS: dict[str, Check] = {
    "keywords:existence": exist,
    "keywords:forbidden_words": forbidden,
    "keywords:frequency": frequency,
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": first_word,
    "detectable_format:number_bullet_lists": number_bullets,
    "detectable_format:title": title,
    "detectable_format:json_format": json_format,
    "detectable_format:number_highlighted_sections": highlighted,
    "detectable_format:multiple_sections": sections,
    "detectable_format:constrained_response": constrained_response,
    "detectable_content:number_placeholders": placeholders,
    "detectable_content:postscript": postscript,
    "change_case:english_lowercase": lowercase,
    "change_case:english_capital": uppercase,
    "change_case:capital_word_frequency": capital_words,
    "language:response_language": response_language,
    "punctuation:no_comma": no_comma,
    "startend:quotation": quotation,
    "startend:end_checker": end_checker,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
}
"""By the names that data sets use."""


def holds(text: str, name: str, arguments: dict[str, Any]) -> bool:
    """Whether `text` keeps the rule. Raises TypeError or ValueError for wrong arguments."""
    return CHECKS[name](text, **{k: v for k, v in arguments.items() if v is not None})
