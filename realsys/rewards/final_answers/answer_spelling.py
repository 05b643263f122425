"""One spelling for what LaTeX and people write in many ways, before it is parsed (pure).

Characters (``½``, ``x²``, ``π``, ``≤``) become commands, sizes and spaces go, ``\\dfrac`` is ``\\frac``.
Every pattern here takes time in proportion to the text.
"""

from __future__ import annotations

import re

_FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5),
    "⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8),
    "⅞": (7, 8), "⅐": (1, 7), "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
_SIGNS = {
    "−": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "∕": "/", "⁄": "/", "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "∛": r"\sqrt[3] ",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^{\circ}",
    "º": r"^{\circ}", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "≡": r"\equiv ", "≈": r"\approx ", "∶": ":", "：": ":", "，": ",", "（": "(", "）": ")",
    "∨": r"\lor ", "∖": r"\setminus ", "⟨": "(", "⟩": ")", "→": r"\to ", "′": "'", "’": "'",
    "℃": r"^{\circ}\text{C}", "℉": r"^{\circ}\text{F}", "\u200b": "", "\ufeff": "", "\u2061": "",
    "\u00a0": " ", "\u2007": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ", "\t": " ",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta",
    "λ": "lambda", "μ": "mu", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega",
}  # fmt: skip
_CHARACTERS = str.maketrans(
    {
        **{sign: rf"\frac{{{above}}}{{{below}}}" for sign, (above, below) in _FRACTIONS.items()},
        **_SIGNS,
        **{letter: rf"\{name} " for letter, name in _GREEK.items()},
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣ", "0123456789+-nx")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣ]+")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
SIZES = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|rm|bf|it|mathstrut)"
    r"(?![A-Za-z])"
)
SPACES = re.compile(
    r"(?<!\\)\\(?:[,;:!> ]|q?quad(?![A-Za-z])|thinspace|medspace|thickspace|enspace|hfill|newline)"
    r"|\\[hv]space\*?\{[^{}]{0,20}\}|\\phantom\{[^{}]{0,40}\}|~"
)
NAMES = re.compile(
    r"\\(?:dfrac|tfrac|cfrac|leqslant|leq|geqslant|geq|neq|dbinom|tbinom|arrow)(?![A-Za-z])"
)
_NAMES = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\leq": r"\le",
    r"\leqslant": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", r"\neq": r"\ne",
    r"\dbinom": r"\binom", r"\tbinom": r"\binom", r"\arrow": r"\to",
}  # fmt: skip
COLOURS = re.compile(r"\\(?:text)?color\s?\{[^{}]{0,30}\}|\\underline(?![a-z])")
ROW_GAPS = re.compile(r"\\\\\s?\[[^\[\]]{0,12}\]")
PYTHON_POWER = re.compile(r"(?<=[\w)])\*\*(?=[\w({-])")
ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")
HALF_DAY = re.compile(r"\b([apAP])\.[mM]\.?")
IDLE_SPACE = re.compile(r"(?<![\w.])\s|\s(?![\w.])")
DELIMITERS = re.compile(r"(?<!\\)\$|(?<!\\)\\[()\[\]]")
_BEFORE, _BEHIND = " *`:,;", " *`:,;."
WHITE = re.compile(r"\s+")


def closed_up(text: str) -> str:
    """Returns a ``spelt`` text without the spaces that divide nothing; ``4 44`` keeps its own."""
    return IDLE_SPACE.sub("", text)


def spelt(text: str) -> str:
    """Returns ``text`` in one spelling; ``\\text{…}``, which may hold words, stays."""
    text = LOWERED.sub(lambda found: f"_{{{found[0].translate(_SUBSCRIPTS)}}}", text)
    text = RAISED.sub(lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    text = text.translate(_CHARACTERS)
    text = ROW_GAPS.sub(r"\\\\ ", text)
    text = SIZES.sub(" ", COLOURS.sub("", text))
    text = text.replace("{,}", ",").replace(",\\!", ",")
    text = SPACES.sub(" ", text)
    text = NAMES.sub(lambda found: _NAMES[found[0]], text)
    text = text.replace(r"\%", "%").replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = PYTHON_POWER.sub("^", text)
    text = HALF_DAY.sub(r"\1m", ORDINAL.sub("", text))
    if text.count("$") == 1:  # a price: LaTeX has two
        text = text.replace("$", r"\$").replace(r"\\$", r"\$")
    text = DELIMITERS.sub(" ", text)
    return WHITE.sub(" ", text).lstrip(_BEFORE).rstrip(_BEHIND)
