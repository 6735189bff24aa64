from __future__ import annotations

import sys

import numpy as np
import pytest

from unitsphere.images.contact_sheet import APART, GAP, MARGIN, PAPER, contact_sheet


def flat(height: int, width: int, *value: int) -> np.ndarray:
    return np.broadcast_to(np.array(value, np.uint8), (height, width, len(value))).copy()


def test_pictures_stand_in_a_grid_with_their_colours() -> None:
    rows = [[flat(10, 10, 255, 0, 0), flat(50, 50, 7)], [flat(300, 300, 0, 0, 255, 255)]]
    sheet = np.asarray(contact_sheet(rows, tile=40))
    assert sheet.shape == (2 * MARGIN + 80 + GAP, 2 * MARGIN + 80 + GAP + APART, 3)
    middle = MARGIN + 20
    assert sheet[middle, middle].tolist() == [255, 0, 0]
    assert sheet[middle, middle + 40 + GAP + APART].tolist() == [7, 7, 7]
    assert (sheet[:, MARGIN + 40 : MARGIN + 40 + GAP + APART] == PAPER).all()  # the first stands apart
    assert sheet[middle + 40 + GAP, middle].tolist() == [0, 0, 255]
    assert sheet[middle + 40 + GAP, middle + 40 + GAP + APART].tolist() == list(PAPER)  # the shorter row


def test_proportions_are_kept_and_transparency_shows_what_is_behind() -> None:
    sheet = np.asarray(contact_sheet([[flat(10, 40, 0, 0, 0), flat(8, 8, 0, 0, 0, 0)]], tile=40))
    tile = sheet[MARGIN : MARGIN + 40, MARGIN : MARGIN + 40]
    black = (tile == 0).all(axis=2)
    assert black.sum() == 10 * 40 and black[15:25].all()
    assert (sheet[MARGIN : MARGIN + 40, MARGIN + 40 + GAP + APART :] > 200).all()


def test_captions_are_written_in_their_own_column_however_long() -> None:
    rows = [[flat(8, 8, 0, 200, 0)]] * 3
    captions = ["short", "words " * 80, "a/file/name/without/any/space/" * 20]
    plain, captioned = contact_sheet(rows, tile=48), contact_sheet(rows, captions, tile=48)
    assert captioned.height == plain.height
    extra = captioned.width - plain.width
    assert np.array_equal(np.asarray(captioned)[:, extra + MARGIN :], np.asarray(plain)[:, MARGIN:])
    column = np.asarray(captioned)[:, : extra + MARGIN].astype(int)
    ink = (np.abs(column - np.array(PAPER)).sum(axis=2) > 60).any(axis=1)
    for r in range(3):
        top = MARGIN + r * (48 + GAP)
        assert ink[top : top + 48].any()
        assert not ink[top + 48 : top + 48 + GAP].any()


def captioned(text: str) -> bytes:
    return contact_sheet([[flat(8, 8, 0, 0, 0)]], [text]).tobytes()


def test_letters_beyond_ascii_are_written_where_a_font_has_them() -> None:
    pytest.importorskip("matplotlib")
    sheets = {text: captioned(text) for text in ("caf?", "cafe", "café", "cafж", "cafя")}
    assert len(set(sheets.values())) == 5  # what a font lacks, it writes alike
    assert captioned("cafe\N{COMBINING ACUTE ACCENT}") == sheets["café"]  # as macOS spells names


def test_without_such_a_font_accents_are_left_out_and_other_letters_are_question_marks(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert captioned("Crème brûlée №.jpg") == captioned("Creme brulee No.jpg")
    assert captioned("日本 ж.jpg") == captioned("?? ?.jpg")
