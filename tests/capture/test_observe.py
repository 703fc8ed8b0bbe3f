"""A call whose end we could not read has returned all the same, and the record says so."""

from pathlib import Path

import pytest
import torch

import provenance
from provenance.capture import observe
from provenance.store import database, queries
from tests.fakes import models


def test_an_end_that_cannot_be_read_is_partial_and_no_crash(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provenance.init(db=db, writer="off")
    model = provenance.wrap(models.llama())
    ids = torch.tensor([[1, 2, 3]])
    expected = type(model).generate(model, ids, max_new_tokens=4, do_sample=False)

    def broken(*_: object) -> None:
        raise LookupError("a surprise of a runtime")

    monkeypatch.setattr(observe, "read_outputs", broken)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert provenance.flush()
    run = queries.load(database.reading("", db), queries.find(database.reading("", db), "last"))
    assert run.status == "partial"
    assert run.sequences[0].input_ids == (1, 2, 3)
    assert "could not be read" in run.sequences[0].no_evidence
