"""What texts of answers stand for by our own parser, whole: what it reads wrongly may still score, by the
library that is asked where it can't read."""

from fractions import Fraction

import pytest

from realsys.rewards.final_answers.answer_comparison import Rationals, Undecided, same
from realsys.rewards.final_answers.math_forms import readings
from realsys.rewards.final_answers.measures import AnswerUnit


def shown(form):
    """A form in brackets; decimal numbers with ~, units as <scale·factor dimensions | words>."""
    if isinstance(form, AnswerUnit):
        powers = " ".join(f"{name}{count:+}" for name, count in form.dimensions or ())
        words = " ".join(sorted(form.words))
        return f"<{form.scale}·{form.factor} {powers} | {words}{' any' * form.is_any}>"
    if not isinstance(form, tuple):
        return str(form)
    if form[:1] == ("number",):
        assert isinstance(form[1], Fraction)
        return f"{form[1]}{'~' * form[2]}"
    if form[:1] in (("term",), ("name",)):
        return shown(form[1])
    return "(" + " ".join(map(shown, form)) + ")"


READ = [
    ("(1,2)(3,4)", ""),
    ("(1,2)+(3,4)", ""),
    (r"\{1,2\}\{3\}", ""),
    ("{x+1}{y}", "(times (add x 1) y)"),
    ("(1, 2]", "(tuple (] (1 2))"),
    (r"\langle 1, 2\rangle", "(tuple () (1 2))"),
    ("(x = 1)", "(equation (x 1))"),
    ("{5}", "5"),
    (r"\{\}", "(set ())"),
    (r"\emptyset", "(set ())"),
    (r"\{x | x > 1\}", "(inequality (>) (x 1))"),
    (r"\mathbb{R}", r"(text all \mathbb{R})"),
    ("{{{5}}}", "5"),
    ("3 1/2", "7/2"),
    ("-3 1/2", "-7/2"),
    ("-3 2/3", "-11/3"),
    (r"3\frac{1}{2}", "7/2"),
    (r"-3\frac{2}{3}", "-11/3"),
    ("3 3/2", ""),
    ("0.50", "1/2~"),
    (r"\pm 2", "(list (2 (neg 2)))"),
    (r"2\vec{v}", "(times 2 vec v)"),
    (r"\overline{AB}", "overline AB"),
    ("x<y<z", "(inequality (< <) (x y z))"),
    ("3-4", "(add 3 -4)"),
    (r"\$5", "(measure 5 <1·1 dollar+1 | dollar>)"),
    (r"\$101_2", "(based 101 2)"),
    (r"\$ 5 \text{ per day}", "(measure 5 <1·1/86400 dollar+1 time-1 | day dollar per>)"),
    (r"5 \$", "(measure 5 <1·1 dollar+1 | dollar>)"),
    (r"5\%", "(percent 5)"),
    ("5 percent", "(percent 5)"),
    (r"5\% of 3", ""),
    (r"30^\circ", "(measure 30 <1·1 degree+1 | degree>)"),
    (r"-30^\circ", "(measure (neg 30) <1·1 degree+1 | degree>)"),
    (r"-5^\circ C", "(neg (times (degree 5) C))"),
    ("101_2", "(based 101 2)"),
    ("1A_{16}", "(based 1A 16)"),
    (r"101_{\text{two}}", "(based 101 2)"),
    ("007_8", "(based 7 8)"),
    ("11 base 2", "(based 11 2)"),
    ("3 (mod 7)", "(modulo 3 7)"),
    (r"5 (\text{mod } 7)", "(modulo 5 7)"),
    ("5(mod 7)", "(modulo 5 7)"),
    (r"3 \pmod{7}", "(modulo 3 7)"),
    (r"x \equiv 3 \pmod{7}", "(equation (x (modulo 3 7)) ==)"),
    (r"5 \text{ km/h}", "(measure 5 <1·5/18 length+1 time-1 | h km>)"),
    (r"5 \text{ m}^2", "(measure 5 <1·1 length+2 | m>) ; (times 5 (power m 2))"),
    (r"5 \text{ square feet}", "(measure 5 <1·145161/1562500 length+2 | feet square>)"),
    (r"5 \text{ m/s}^2", "(measure 5 <1·1 length+1 time-2 | m s>)"),
    (r"3 \text{ million dollars}", "(measure 3 <1000000·1 dollar+1 | dollar>)"),
    (r"5 \text{ cubic cm per hour}", "(measure 5 <1·1/3600000000 length+3 time-1 | cm cubic hour per>)"),
    (r"5 \text{ apples}", "(measure 5 <1·1  | apple>)"),
    ("20 degrees Celsius", "(measure 20 <1·1 degree+1 | celsius degree>)"),
    ("5 m^{-2}", "(measure 5 <1·1 length-2 | m>) ; (times 5 (power m -2))"),
    (r"5 \text{ kg m}^{-3}", "(measure 5 <1·1 length-3 mass+1 | kg m>)"),
    ("5 m^2-3", "(measure 5 <1·1 length+2 | m>) ; (add (times 5 (power m 2)) -3)"),
    (r"5 \text{ per s}^2", "(measure 5 <1·1 time-2 | per s>)"),
    (r"2 \text{ inches squared}", "(measure 2 <1·16129/25000000 length+2 | inche squared>)"),
    (r"5 \text{ units}", "(measure 5 <1·1  |  any>)"),
    ("(B) 12", "(choice B 12)"),
    ("(B)", "(choice B None)"),
    ("B", "(choice B None) ; (text b)"),
    ("x = 1 or x = 2", "(list ((equation (x 1)) (equation (x 2))))"),
    ("x<1 or x>2", "(either ((inequality (<) (x 1)) (inequality (>) (x 2))))"),
    ("x>1 and x<2", "(both ((inequality (>) (x 1)) (inequality (<) (x 2))))"),
    ("1, 2", "(list (1 2))"),
    ("1,234", "1234"),
    ("(1,234)", "(tuple () (1 234))"),
    ("2:3", "(ratio (2 3))"),
    (r"1 \le x < 2", "(inequality (<= <) (1 x 2))"),
    (r"x \in [1,2)", "(in x (tuple [) (1 2)))"),
    (r"(1,2) \cup [3,4)", "(cup ((tuple () (1 2)) (tuple [) (3 4))))"),
    (r"R \setminus \{0\}", "(setminus (R (set (0))))"),
    ("twelve", "(text twelve)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(matrix ((1 2) (3 4)))"),
    (r"\begin{vmatrix}1\end{vmatrix}", "(determinant ((1)))"),
    (r"\begin{array}{cc}1&2\end{array}", "(matrix ((1 2)))"),
    ("f(x)=x+1", "(equation ((times f x) (add x 1)))"),
    (r"\sqrt[3]{8}", "(root 3 8)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "forms"), READ)
def test_what_a_text_may_stand_for(text, forms):
    assert " ; ".join(map(shown, readings(text))) == forms


@pytest.mark.parametrize(
    ("found", "known", "decided"),
    [
        (r"72\%", "72", True),
        ("72", r"72\%", True),
        (r"72\%", "0.72", True),
        ("0.72", r"72\%", True),
        ("7200", r"72\%", False),
        (r"72\%", r"73\%", False),
        (r"72 \text{ km}", r"72\%", False),
        (r"72\%", r"72 \text{ km}", False),
        (r"36 \text{ km/h}", r"10 \text{ m/s}", True),
        (r"36 \text{ km/h}", r"36 \text{ m/s}", False),
        (r"5 \text{ m}^{-2}", r"5 \text{ m}^2", False),
        (r"3 \text{ million dollars}", "3000000", True),
        (r"3 \text{ million dollars}", "3", False),
        ("5 (mod 7)", "5", True),
        ("5 (mod 7)", r"5 \pmod{8}", False),
        ("101_2", "101", True),
        ("101_2", "5", False),
        (r"x<2 \text{ and } x>1", "(1,2)", True),
        (r"x<y\le z", "x<y<z", False),
        ("2+4=6", "6", True),
        ("6=2+4", "6", False),
        ("2+4=7", "6", False),
        (r"3\times 10^5", "300000", True),
        ("300000", r"3\times 10^5", True),
        (r"3\times 5", "15", False),
        ("6", r"\binom{4}{2}", True),
        ("3", r"\lfloor 7/2\rfloor", True),
        ("4", r"\lceil 7/2\rceil", True),
        ("24", "4!", True),
        ("6", "|-6|", True),
        ("2", r"\gcd(4,6)", True),
        ("x<0.5<y", r"x<\frac{1}{2}<y", True),
        (r"x<0.5\le y", r"x<\frac{1}{2}<y", False),
        ("x<0.6<y", r"x<\frac{1}{2}<y", False),
        (r"3\times 100000", r"3\times 10^5", False),
        (r"30\times 10^4", r"3\times 10^5", True),
        ("0.333333", r"\frac{1}{3}", None),
        ("0.33", r"\frac{1}{3}", False),
    ],
)
def test_what_fractions_decide_needs_no_library(found, known, decided):
    try:
        assert same(readings(known)[0], readings(found)[0], Rationals()) is decided
    except Undecided:
        assert decided is None
