"""The reward `math`: which answers are right for a reference, and which are not."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fp8rl.rollout.tasks.rewards.mathematics import math, prepare

# fmt: off
RIGHT = {
    # Decimals, small and large.
    r"1.6 \times 10^{-19}": [r"\boxed{1.6 \times 10^{-19}}", r"\boxed{1.6 \cdot 10^{-19}}", "It is 1.6 × 10⁻¹⁹ C.",
        "It is 1.6e-19.", r"\boxed{16 \times 10^{-20}}", "It is 1.6 x 10^-19.", r"\boxed{1.6 * 10^-19}"],
    "0.0000002": [r"\boxed{2 \times 10^{-7}}", r"\boxed{\frac{1}{5000000}}"], "#### 0.00000012": ["#### 0.00000012"],
    r"6.02 \times 10^{23}": [r"\boxed{602 \times 10^{21}}"], "0.3": [r"\boxed{0.1+0.2}", r"\boxed{.30}"],
    "2^{100}": [r"\boxed{1267650600228229401496703205376}"], "e^{-100}": [r"\boxed{\frac{1}{e^{100}}}"],
    "2e-3": [r"\boxed{-3+2e}"], "2000000": ["It is 2e6.", r"\boxed{2e+06}"], "10^{10^{10}}": [r"\boxed{10^{10^{10}}}"],
    # Fractions, roots, expressions.
    r"\frac{3}{4}": [r"\boxed{\dfrac{6}{8}}", r"\boxed{3/4}", r"\boxed{0.75}", "**3/4**", "`0.75`", "3⁄4",
        r"\boxed{\textstyle\frac{3}{4}}", r"\boxed \frac{3}{4}", r"$\boxed .75$."],
    r"2\frac{1}{2}": [r"\boxed{\frac{5}{2}}"], r"\sqrt{2}+\sqrt{3}": [r"\boxed{\sqrt{5+2\sqrt{6}}}"],
    r"\frac{\pi}{4}": [r"\boxed{\arctan 1}"], r"\frac{v^2}{2\mu g}": [r"\boxed{\frac{v^2}{2 \mu g}}"],
    r"\frac{5\pi}{2}": ["The answer is 2½π."], r"\log_2 8": [r"\boxed{3}"],
    "x^2+2x+1": [r"\boxed{(x+1)^2}", r"**$(x+1)^2$**"], "a_1+b_2": [r"\boxed{b_2+a_1}"], "3+4i": [r"\boxed{4i+3}"],
    r"-\infty": [r"\boxed{-\infty}"],
    # Sets, intervals, matrices.
    r"\{1,2,3\}": [r"\boxed{\{3,2,1\}}", r"\boxed{3, 1, 2}"], r"\pm 2": [r"\boxed{2,-2}"],
    r"[0,\frac12)": [r"\boxed{[0,0.5)}"], r"(-\infty,2)\cup(3,\infty)": [r"\boxed{(3,\infty)\cup(-\infty,2)}"],
    r"(-\infty,2]": [r"\boxed{x \le 2}"], r"x \le 2": [r"\boxed{(-\infty,2]}"], "1<x<2": [r"\boxed{(1,2)}"],
    r"\begin{pmatrix}0.5\\1\end{pmatrix}": [r"\boxed{\begin{bmatrix}\frac12\\ 1\end{bmatrix}}"],
    # Equations.
    "x = 5": [r"\boxed{5}", r"\boxed{x=5}", "So **x = 5**"], "y = 2x + 1": [r"\boxed{2x - y + 1 = 0}"],
    "x=2,y=3": [r"\boxed{x=2,y=3}"], r"x=\frac12": [r"\boxed{x=0.5=\frac12}"],
    # Words.
    r"\text{Monday}": [r"\boxed{\text{Monday}}", r"\boxed{Monday}"], r"\text{(C)}": [r"\boxed{C}"],
    # Currency.
    "#### 72": [r"\boxed{\$72}", r"Final: \$72", "Final: $72.", r"First \$50, then \$22, so \$72.",
        r"It is \(\$72\).", "It is $72$.", r"#### \$72", "#### **72**", r"**Total: \$72.00** in all", "`$72`",
        r"US\$72", "72 dollars", r"\boxed{72 dollars}", "72€"],
    r"\$18.90": [r"\boxed{18.9}", r"\boxed{\$18.90}", r"\$18.90", "$18.90"],
    "$18.90": [r"\boxed{18.9}", "It costs €18.90."], "20 dollars": [r"\boxed{20}"],
    # Thousands.
    "1234567": [r"\boxed{1,234,567}", r"\boxed{1{,}234{,}567}", r"\boxed{1\,234\,567}", r"\boxed{1 234 567}",
        "It is 1,234,567.", "1'234'567", r"\$1,234,567.00", r"\boxed{1\text{,}234\text{,}567}", r"\boxed{1_234_567}",
        r"\boxed 1,234,567"],
    "12,345": [r"\boxed{12345}"], r"\$3.2\text{ million}": [r"\boxed{3200000}", "It is $3.2 million."],
    # Units and percent.
    r"5\text{ cm}": [r"\boxed{5}", r"\boxed{5 \mathrm{~cm}}", "It is 5 cm.", r"\boxed{5 \rm cm}",
        r"\boxed{5\,{\rm cm}}", r"\boxed{5 kHz}", r"\boxed{5 kJ/mol}", r"\boxed{5\ \Omega}", r"\boxed{5 \mathsf{cm}}"],
    r"1 \text{ hour } 5\text{ minutes}": [r"\boxed{1\text{ hour }5\text{ minutes}}", r"\boxed{1 hour 5 minutes}"],
    "20 apples": [r"\boxed{20}", r"\boxed{20 apples}"], "90": [r"\boxed{90^{\circ}}", r"\boxed{90\degree}"],
    r"12.5\%": [r"\boxed{12.5}", r"\boxed{12.5\%}", r"\boxed{\frac18}", "It is 12.5%."], "0.25": [r"\boxed{25\%}"],
    "25": [r"\boxed{25\%}"], r"-5\%": [r"\boxed{-5}", r"\boxed{-0.05}", r"\boxed{-5\%}", "It is -5%.", "#### -5%"],
    "-5": [r"\boxed{-5\%}", "It is -$5.", r"It is -\$5.", "It is $-5.", "−5", "It is **-5**.", "It is negative $-5$."],
    r"33\frac{1}{3}\%": [r"\boxed{\frac13}", r"\boxed{33\frac13\%}", r"\boxed{\frac{100}{3}\%}", r"#### \frac13"],
    "1,200%": [r"\boxed{12}", r"\boxed{1200\%}"], r"7^\circ C": [r"\boxed{7}", "It is 7 °C."],
    r"\varnothing": [r"\boxed{\emptyset}", r"\boxed{∅}"],
    "5 m/s": [r"\boxed{5}", r"\boxed{5\text{ m/s}}", "It is 5 m/s."],
    "10 cm^2": [r"\boxed{10}", r"\boxed{10 cm²}", r"\boxed{10 cm^2}", "#### 10 cm^2"], "9.8 m/s²": [r"\boxed{9.8}"],
    # Signs that are no LaTeX.
    "2√2": [r"\boxed{2\sqrt{2}}", r"\boxed{\sqrt 8}"], r"3\sqrt{x+1}": [r"\boxed{3√(x+1)}"],
    "[1,∞)": [r"\boxed{[1,\infty)}", r"\boxed{x \ge 1}", r"\boxed{[1, ∞)}"], "3²": [r"\boxed{9}"],
    "x^2+1": [r"\boxed{x²+1}"], r"e^2+\pi^{10}": [r"\boxed{e²+π¹⁰}"], "c^2": ["So c²."],
    # Blanks of LaTeX.
    "7 hours": [r"\boxed{7~\text{hours}}", r"\boxed{~7\;}", r"It is $7\,$.", r"\boxed{7\enspace\mathrm{km/h}}",
        "It is 7\u202fkm/h."],
    "(3,4)": [r"\boxed{(3,~4)}", "\\boxed{(3,\u00a04)}"],
    # A result behind #### needs no dollars.
    "#### (1,2)": ["#### (1,2)", "First (3,4).\n#### (1, 2).\n", "#### $(1,2)$", r"#### \boxed{(1,2)}"],
    "#### (1/2, 3).": ["#### (0.5, 3)"], "#### C": ["#### C"], "#### x+1": ["#### 1+x"], "#### -\\infty": ["#### −∞"],
    "#### 3:30": ["#### 3:30"],
    # Markdown.
    "42": ["**42**", "The answer is **42.**", "**Answer:** 42", "**Answer: 42**", "***42***", "**_42_**", "__42__",
        "The answer is *42*.", "_42_", "The answer is `42`.", "```\n42\n```", "### Answer\n42", "## 42", "- 42",
        "* **42**", "1. We add.\n2. **42**", "> 42", "| sum |\n|---|\n| **42** |", "<b>42</b>", "**$42$**",
        r"**\boxed{42}**", r"$\boldsymbol{42}$", r"\boxed{\bf 42}", r"\boxed{\textcolor{red}{42}}",
        "<answer>42</answer>", "So <answer>\n42\n</answer>", r"\boxed{\text{The answer is } 42}", "It is 42, I think."],
    "24": ["2*3*4", "2 * 3 * 4"], "#### 0.5": [r"so it is $\frac{1}{2}$"], "4+4\n#### 10": ["13,18,10\n#### 10"],
    "8": ["2**3"],
    # Decimals with a cycle.
    "1/3": [r"\boxed{0.\overline{3}}", r"\boxed{0.\bar{3}}", r"\boxed{0.\dot{3}}", r"\boxed{0.\overline3}",
        r"\boxed{.\dot 3}", r"It is $0.\overline{33}$.", r"It is 0.\overline{3}.", "0.333...", r"\boxed{0.333\ldots}"],
    r"0.\overline{3}": [r"\boxed{\frac{1}{3}}", r"\boxed{0.\bar{3}}"],
    r"2.1\overline{6}": [r"\boxed{\frac{13}{6}}", r"\boxed{2\frac{1}{6}}"], "13/6": [r"\boxed{2.1\overline{6}}"],
    r"-0.\overline{09}": [r"\boxed{-\frac{1}{11}}"],
    r"-\frac{1}{11}": [r"\boxed{-0.\overline{09}}", r"It is -0.\overline{09}."],
    r"1.\overline{09}": [r"\boxed{12/11}", r"\boxed{1 1/11}"], r"5.\overline{36}": [r"\boxed{\frac{59}{11}}"],
    "59/11": [r"\boxed{5.\overline{36}}"],
    r"\frac17": [r"\boxed{0.\dot{1}4285\dot{7}}", r"\boxed{0.\overline{142857}}"],
    r"1,234.\overline{3}": [r"\boxed{\frac{3703}{3}}"],
    # Mixed numbers.
    "3 1/2": [r"\boxed{7/2}", r"\boxed{3.5}", r"\boxed{3 1/2}"],
    "7/2": [r"\boxed{3 1/2}", r"\boxed{3\ 1/2}", r"\boxed{3½}", r"\boxed{3\frac12}", r"\boxed{3\,\frac{1}{2}}",
        r"It is 3\dfrac{1}{2}.", "The answer is 3 1/2.", "**3 1/2** m", "3½ m", "#### 3 1/2"],
    "-3 1/2": [r"\boxed{-\frac{7}{2}}"],
    r"-\frac72": [r"\boxed{-3 1/2}", "It is -3 1/2.", r"It is -3\frac{1}{2}.", "−3½"],
    "1,234 1/2": [r"\boxed{1234.5}"], r"\frac12": [r"\boxed{½}"], r"\frac{2x}{3}": [r"\boxed{2\frac{1}{3}x}"],
    r"\frac{\sqrt3}{2}": [r"\boxed{\sqrt 3\frac12}"], r"\{2, 7/2\}": [r"\boxed{2, 3 1/2}"],
    "x - 7/2": [r"\boxed{x-3 1/2}"],
    # Several boxes.
    "5": [r"\boxed{6}, wait, no: \boxed{5}", r"$\boxed{6}$, no: $\boxed{5}$", r"\boxed{5} and again \boxed{5}",
        r"\boxed{x=\boxed{5}}", r"\boxed{5}. Check: 4+1=5, and also 6", r"\fbox{5}", r"\boxed 5", r"\boxed{5,}",
        r"\boxed{\approx 5}", r"<think>\boxed{6}</think> \boxed{5}", r"<think>\boxed{6}</think> It is 5.",
        "#### Final answer\n5", "#### Step 1: 2+3\n" + r"\boxed{5}", r"\boxed{5}" + "\n#### Check\nIt works.",
        "#### 5 apples in all", "#### The answer is 5", "The answer is 5 (see step 3).", "5 ✓", "It is ５."],
    # The last statement, read to its end.
    "#### 120": ["#### 5!", "It is $5!$"], "#### 6": ["#### 2(3)", r"\boxed{2(3)}", "It is 2 × 3."],
    r"2\pi": ["The answer is 2π.", "#### 2 pi"], r"2\sqrt{2}": ["The answer is 2√2.", "#### 2√2", "It is 2 sqrt(2)."],
    "(1,2]": ["The answer is (1, 2].", "#### (1, 2]"], "3-4i": ["The answer is 3-4i.", "#### 3 - 4i"],
    r"\{5,6\}": ["x = 5 or x = 6", "The answers are 5 and 6.", "#### 5, 6", r"$x=5$ or $x=6$"],
    r"\pm 3": ["It is ±3.", "#### ±3"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [r"It is \begin{pmatrix}1\\2\end{pmatrix}."], "1024": ["#### 2**10"],
    "15000000000": ["It is 1.5 × 10^10.", "#### 1.5e10"], "1/6": ["#### 0.1(6)"], "#### 5:30": ["It is 5:30 pm."],
    "#### 8": ["The answer is 7. No, 8.", "The answer is $7$. Sorry, $8$.", "Answer: 7. Correction: 8",
        "The answer is 7. Wait, it is 8.", "Final answer is 7. Hmm, the answer is 8", "The answer is not 7 but 8.",
        "The answer is 8, since there are 2 rows of 4.", "The answer is 8. I checked it in 3 ways.",
        "The answer is 8, not 9.", "She buys 3+5=<<3+5=8>>8 eggs."],
    r"\{1,2\}": [r"\boxed{1} and \boxed{2}", r"\boxed{1} \text{ and } \boxed{2}",
        r"\boxed{3}, no: \boxed{1, 2}", r"\boxed{3}, no: \boxed{\{1,2\}}"],
}
WRONG = {
    r"1.6 \times 10^{-19}": [r"\boxed{9.1 \times 10^{-31}}", r"\boxed{3.2 \times 10^{-19}}", r"\boxed{0}", "1.7e-19"],
    "0.0000002": [r"\boxed{0.0000001}", r"\boxed{0}"], "0": [r"\boxed{0.0000004}"],
    "#### 0.00000012": ["#### 0.00000013"], "10^{-300}": [r"\boxed{10^{-301}}"], "e^{-100}": [r"\boxed{e^{-101}}"],
    r"\binom{50}{25}^{-1}": [r"\boxed{0}"], "123456789.1": [r"\boxed{123456789.2}"],
    "10^{20}": [r"\boxed{10^{20}+1}"], r"\sqrt{10^{20}+1}": [r"\boxed{10^{10}}"],
    "1/3": [r"\boxed{0.333333}", r"\boxed{0.33}"], r"\frac{1}{0}": [r"\boxed{\frac{2}{0}}"],
    "2e-3": [r"\boxed{0.002}"], r"\pi": [r"\boxed{3.14159}"], r"\sqrt{2}": [r"\boxed{-\sqrt{2}}"],
    "3+4i": [r"\boxed{3-4i}"], r"\infty": [r"\boxed{-\infty}"], r"\{1,2,3\}": [r"\boxed{\{1,2\}}"],
    r"\{0.0000001, 1\}": [r"\boxed{\{0.0000002, 1\}}"], "(10^{-20}, 1)": [r"\boxed{(10^{-21}, 1)}"],
    "(1,2)": [r"\boxed{(2,1)}"], "[0,1)": [r"\boxed{[0,1]}"],
    r"\begin{pmatrix}0.00000001\\1\end{pmatrix}": [r"\boxed{\begin{pmatrix}0.00000002\\1\end{pmatrix}}"],
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [r"\boxed{\begin{pmatrix}1&3\\2&4\end{pmatrix}}"],
    "x = 10^{-20}": [r"\boxed{x = 10^{-21}}"], "x > 1": [r"\boxed{x < 1}"], "x=2,y=3": [r"\boxed{x=3,y=2}"],
    r"\text{Monday}": [r"\boxed{\text{Tuesday}}"], "#### 1/2": [r"\boxed{0.25}"], "#### 10": ["#### 11", ""],
    "#### 72": [r"First \$72, then \$22, so \$50.", r"\boxed{\$73}", "**#### 73**"], r"\$18.90": [r"\boxed{\$18.91}"],
    r"5\text{ cm}": [r"\boxed{6\text{ cm}}"], "5 million": [r"\boxed{5}", r"\boxed{5\text{ billion}}"],
    r"50\%": [r"\boxed{5}", r"\boxed{51\%}", r"\boxed{5000}"],
    "42": ["**43**", "`43`", "", "I do not know.", r"\boxed{-42}", r"\boxed{42, 43}", r"\boxed{43}. Check: 42"],
    "3": ["**-3**", "5 3/4"], r"-5\%": [r"\boxed{5}", r"\boxed{0.05}", r"\boxed{5\%}", r"\boxed{-0.5}"],
    r"33\frac{1}{3}\%": [r"\boxed{\frac{1}{4}}", r"\boxed{33}"], r"\varnothing": [r"\boxed{0}"],
    "2√2": [r"\boxed{2}"], "2": [r"\boxed{2√2}"], "3²": [r"\boxed{3}"], "10 cm^2": [r"\boxed{100}"],
    "5 m/s": [r"\boxed{6 m/s}"], "#### (1,2)": ["#### (2,1)", "#### (1,3)", "#### 2"], "#### C": ["#### D"],
    "#### 3:30": ["#### 3:45"], r"0.\overline{3}": [r"\boxed{0}", r"\boxed{0.3}", r"\boxed{0.\overline{6}}"],
    r"5.\overline{36}": [r"\boxed{5}", r"\boxed{5.36}"], "3 1/2": [r"\boxed{2}", r"\boxed{3/2}"], "1": ["3 1/2"],
    # A part is not the whole.
    "#### 2": ["#### 2√2", "#### 2π", "#### 2x", "#### (1, 2]", "#### 2(3)", "#### 2 @ 7", "#### 1 or 2",
        "#### {1, 2}"],
    "#### 3": ["#### 3√2/2", "#### 3+4i", "#### 3:30", "#### 3i", "#### ±3", "#### x > 3", "#### 3 feet 5 inches",
        "#### 3½"],
    "#### 5": ["#### 5!", "5\n####", r"\boxed{5}" + "\n#### 7", "#### 2(3)", "#### 7 @ 5", "#### 1.5e5", "#### - 5"],
    "2.0": ["It is 2√2.", "It is 2π.", "So it is 2x.", "It is (1, 2].", "It is 2(3).", "It is log 2.", "It is 2 pi.",
        "It is x^2."],
    "3.0": ["It is 3√2/2.", "It is 3+4i.", "It is 3 1/2.", "It is 3 or 4.", "It is 4 or 3.", "It is 3/4.",
        "It is ±3.", "x > 3"],
    "1.5": ["It is 1.5e10.", "It is 1.5 × 10^10."],
    "7.0": ["The answer is 7. No, 8.", "The answer is 7. Wait, it is 8.", "Final answer is 7. Hmm, the answer is 8"],
    "5.0": [r"so \boxed{5}. Final: \boxed{}", r"so \boxed{5}. Final: \boxed{", r"so \boxed{5}. Final: \boxed{7",
        r"\boxed{5} and \boxed", r"\boxed{5}. Final: \fbox{6}", r"\boxed{5} or \boxed{6}", r"\boxed{\pm 5}",
        r"\boxed{5t}", r"\boxed{5ab}", r"\boxed{2 3}", r"\boxed{2 @ 5}", r"\boxed 5.5",
        r"\boxed{5 \text{ million}}", r"\boxed{5\text{ ft }6\text{ in}}", r"\boxed{5\text{ if }n>2, 6\text{ if not}}",
        r"<think>\boxed{5}</think> It is 6."],
    r"\frac12": [r"\boxed{\frac{1}{2}} no: \boxed{\frac{1}{3", r"\boxed{\frac{1}{2} @ 3}"],
    r"\boxed \frac{1}{2}": [r"\boxed \frac{3}{4}"], "3 feet 5 inches": [r"\boxed{5 feet 3 inches}"],
    "6": [r"\boxed{6}, wait, no: \boxed{5}", r"\boxed{0.\overline{" + "6" * 5000 + "}}"],
}
# fmt: on


@pytest.fixture(scope="module")
def judge() -> Iterator[Any]:
    """`math` in a process of its own. `math` forks for each answer, and a fork of pytest's large process is slow."""
    with multiprocessing.get_context("spawn").Pool(1, prepare) as pool:
        yield lambda *case: pool.apply(math, case)


@pytest.mark.slow
@pytest.mark.parametrize(("reference", "answer"), [(each, own) for each, answers in RIGHT.items() for own in answers])
def test_right_answers_are_right_however_they_are_written(reference: str, answer: str, judge: Any) -> None:
    assert (judge(answer, reference, True), math(answer, reference, finished=False)) == (1.0, 0.0)


@pytest.mark.parametrize(("reference", "answer"), [(each, own) for each, answers in WRONG.items() for own in answers])
def test_wrong_answers_are_wrong_however_near_they_are(reference: str, answer: str, judge: Any) -> None:
    assert judge(answer, reference, True) == 0.0


def test_a_reference_without_an_expression_is_named() -> None:
    with pytest.raises(ValueError, match="expected a reference with an expression"):
        math("3", "#### ", finished=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "result",
    ["10000000!", "9^{9^{9^{9}}}", r"\int_0^1 x^{x^{x^x}} \sin(x^x) dx", "(" * 5000 + "5" + ")" * 5000,
     r"\sqrt{" * 500 + "5" + "}" * 500, "9" * 100_000, "x" * 100_000],
)  # fmt: skip
def test_an_answer_that_would_keep_the_judge_for_minutes_is_wrong_in_seconds(result: str) -> None:
    for answer in (rf"\boxed{{{result}}}", f"#### {result}")[: 1 + (len(result) > 100)]:  # one is enough to evaluate
        before = os.times()
        assert math(answer, "5", finished=True) == 0.0
        after = os.times()
        assert after.children_user + after.children_system - before.children_user - before.children_system < 2.0


@pytest.mark.parametrize("sign", ["1 ", "*", "(", "$", r"\boxed{", r"\frac{", "_a", "<b>", "answer is no, "])
def test_a_long_answer_before_the_result_costs_it_nothing(sign: str) -> None:
    began = time.process_time()
    assert math(sign * (60_000 // len(sign)) + "\n#### 5.0", "5", finished=True) == 1.0
    assert time.process_time() - began < 2.0
