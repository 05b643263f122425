"""The page of models is what the checks by hand found, of all the architectures that are checked."""

from __future__ import annotations

import json

from acceptance.architectures import PAGE, RESULT, YES, page
from architectures import ARCHITECTURES


def test_the_page_is_made_of_the_result():
    assert PAGE.read_text() == page(json.loads(RESULT.read_text()))


def test_the_result_is_of_all_architectures_and_of_what_they_refuse():
    models = json.loads(RESULT.read_text())["models"]
    refused = {n: {c for c, said in found.items() if said != YES} for n, found in models.items()}
    assert refused == {name: {*how.refused} for name, how in ARCHITECTURES.items()}
