"""What is known of the scorers of reasoning-gym (0.1.25): which pay for what is no right answer. No torch.

tests/acceptance/attack_reasoning_gym.py plays exploits on all of them, and wants exactly those in these
tables that it finds.
"""

from __future__ import annotations

from collections.abc import Mapping

# Told in a plan where they are named, and left out of ``task.names=[*]``.
PAYING: Mapping[str, str] = {
    "codeio": "the right answer amid other text scores nearly 1",
    "coin_flip": "a number that begins as the right one does scores 1: 0 for 0.25",
    "complex_arithmetic": "NaN scores 1",
    "futoshiki": "cells that are right by chance score, so much text does",
    "game_of_life_halting": "any text scores 1",
    "gsm_symbolic": "the right number anywhere in the answer scores 1",
    "puzzle24": "any expression that is 24 scores 1, whatever its numbers",
    "quantum_lock": "letters amid other text are pressed: half of the score for any way to the target",
    "sokoban": "moves are read out of any text, so the right ones amid others score 1",
    "sudoku": "cells that are right score, so the right answer amid other text does",
    "time_intervals": "any number or time scores nearly 1",
    "word_sorting": "the right words amid others score the share that stands right",
}
# Those that refuse right answers in common forms (rewards/final_answers/stated_answer.py), with the form
# that they want: their prompts end with it.
REFUSING: Mapping[str, str] = {}
# Those that make no question without arguments.
UNFIT: Mapping[str, str] = {"composite": "it wants the generators that it is made of"}
