"""Predictions of a user's module in one process: its rows, and what is refused before the first of them."""

from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from paceline.tasks.errors import InputError
from paceline.tasks.files import sha256_of
from paceline.tasks.model_bundle import FACTS, WEIGHTS, digest_of, read_facts
from paceline.tasks.records.data import ModuleFacts
from paceline.tasks.records.prediction import ModulePrediction
from paceline.tasks.train.lightning import rows
from paceline.tasks.train.lightning.cli import ModuleCLI, check_prediction
from paceline.tasks.train.lightning.code import identities
from paceline.tasks.train.lightning.fit import _save_weights
from paceline.tasks.train.lightning.prediction import predict_module

pytest.importorskip("jsonargparse", reason="LightningCLI needs it; infra/install brings it")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice

PACKAGE = Path(__file__).parents[3] / "packages" / "text"
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
ODD = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset
from prose.corpus import Corpus
from prose.gpt import GPT


class Silent(GPT):
    def predict_step(self, batch, batch_idx):
        pass


class Finds(GPT):
    def predict_step(self, batch, batch_idx):
        return []


class Fails(GPT):
    def predict_step(self, batch, batch_idx):
        raise RuntimeError("size mismatch of my own")


class Fickle(GPT):
    def predict_step(self, batch, batch_idx):
        return {"label": ["x" if batch_idx else 1] * len(batch["bytes"])}


class Indexed(GPT):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return super().predict_step(batch, batch_idx)


class Bulky(GPT):
    def get_extra_state(self):
        return Stream()

    def set_extra_state(self, state):
        pass


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield {"bytes": torch.ones(64, dtype=torch.long)}


class Endless(Corpus):
    def predict_dataloader(self):
        return DataLoader(Stream(), batch_size=4)


class Empty(Corpus):
    def predict_dataloader(self):
        return DataLoader([])


class Two(Corpus):
    def predict_dataloader(self):
        return [DataLoader(self.validation, batch_size=8)] * 2


class NoPrediction(LightningDataModule):
    pass
"""


@pytest.fixture(autouse=True)
def classes(monkeypatch, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "oddities.py").write_text(ODD)
    for place in (PACKAGE, tmp_path / "odd"):
        monkeypatch.syspath_prepend(str(place))
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def settings_of(tmp_path, model="prose.gpt.GPT", data="prose.corpus.Corpus", **trainer):
    arguments = {"directory": str(tmp_path / "data"), "num_bytes": 20_000}
    return {
        "seed_everything": 7,
        "model": {"class_path": model, "init_args": {"width": 16, "depth": 1, "num_new_bytes": 4}},
        "data": {"class_path": data, "init_args": arguments},
        "trainer": trainer,
    }


@pytest.fixture
def predict(tmp_path):
    """Predicts with settings; the answer, and the rows of all parts."""

    def call(settings, checkpoint=None, model=None):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        job = ModulePrediction(
            settings=settings,
            code=None,
            packages=identities(settings, None),
            checkpoint=checkpoint and str(checkpoint),
            model_directory=model and str(model),
            model_digest=model and digest_of(read_facts(model)),
            precision="32-true",
            gpu=False,
            num_threads=1,
            directory=str(tmp_path),
            out=str(out),
        )
        answer = predict_module(job)
        return answer, [row for path in sorted(out.iterdir()) for row in pq.read_table(path).to_pylist()]

    return call


def test_a_checkpoint_and_its_weights_give_the_rows_of_the_module(tmp_path, predict):
    settings = settings_of(tmp_path)
    cli = ModuleCLI(settings, QUIET | {"max_steps": 3, "limit_val_batches": 0, "default_root_dir": str(tmp_path)})
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.save_checkpoint(tmp_path / "step.ckpt")
    model = tmp_path / "model"
    model.mkdir()
    torch.save(cli.model.state_dict(), model / WEIGHTS)
    facts = {"settings": settings, "packages": (), "precision": "32-true"}
    (model / FACTS).write_text(ModuleFacts(**facts, weights_sha256=sha256_of(model / WEIGHTS)).model_dump_json())

    torch.set_num_threads(1)
    cli.model.eval()
    with torch.inference_mode():
        results = [cli.model.predict_step(batch, 0) for batch in cli.datamodule.predict_dataloader()]
    wanted = [text for result in results for text in result["continuation"]]
    answer, found = predict(settings, checkpoint=tmp_path / "step.ckpt")
    assert [row["continuation"] for row in found] == wanted
    assert found[0]["probability"] == pytest.approx(results[0]["probability"][0].tolist())
    assert (answer.num_samples, answer.num_batches) == (len(wanted), len(results))
    assert answer.columns == {"prompt": "string", "continuation": "string", "probability": "list<item: float>"}
    assert predict(settings, model=model)[1] == found

    settings["model"]["init_args"]["width"] = 8
    assert "the weights do not fit the module (" in predict(settings, model=model)[0].refused[0]
    fault, hint = predict(settings, checkpoint=tmp_path / "step.ckpt")[0].refused
    assert fault.startswith(f"ckpt_path={tmp_path / 'step.ckpt'} does not fit the module (")
    assert "size mismatch for embed.weight" in fault
    assert "ckpt_path=" in hint
    settings["model"] = {"class_path": "oddities.Fails", "init_args": settings["model"]["init_args"] | {"width": 16}}
    with pytest.raises(RuntimeError, match="of my own"):
        predict(settings, checkpoint=tmp_path / "step.ckpt")


def test_a_state_that_holds_more_than_tensors_is_not_kept(tmp_path):
    from oddities import Bulky
    from prose.gpt import GPT

    lightning = SimpleNamespace(code=None)
    spec = SimpleNamespace(rank=0, directory=str(tmp_path), config=SimpleNamespace(lightning=lightning))
    assert _save_weights(spec, Bulky(width=8).state_dict()) is None
    assert torch.load(_save_weights(spec, GPT(width=8).state_dict()), weights_only=True)["embed.weight"].shape == (
        256,
        8,
    )
    lightning.code = "."
    assert _save_weights(spec, GPT(width=8).state_dict()) is None


@pytest.mark.parametrize(
    ("classes_of", "fault", "hint"),
    [
        ({"model": "oddities.Silent"}, "prediction of predict_step cannot be written", "return a tensor"),
        ({"data": "oddities.Endless"}, "has no length, so that it may never end", "trainer.limit_predict_batches"),
        ({"model": "oddities.Finds"}, "predict_step returned no row in 1 batch", "return a tensor"),
        ({"data": "oddities.Empty"}, "predict_dataloader gives no sample", "check the data"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_the_answer(tmp_path, predict, classes_of, fault, hint):
    answer, found = predict(settings_of(tmp_path, **classes_of))
    assert fault in answer.refused[0]
    assert hint in answer.refused[1]
    assert found == []


def test_an_endless_loader_may_have_a_limit_and_loaders_are_numbered(tmp_path, predict):
    answer, found = predict(settings_of(tmp_path, data="oddities.Endless", limit_predict_batches=2))
    assert (answer.num_batches, len(found)) == (2, 8)
    numbered = settings_of(tmp_path, model="oddities.Indexed", data="oddities.Two", limit_predict_batches=1)
    _, found = predict(numbered)
    assert [row["dataloader"] for row in found] == [0] * 8 + [1] * 8


def test_rows_that_are_written_stay_if_a_later_batch_differs(tmp_path, predict, monkeypatch):
    monkeypatch.setattr(rows, "PART_BYTES", 1)
    settings = settings_of(tmp_path, model="oddities.Fickle")
    settings["data"]["init_args"]["batch_size"] = 16
    with pytest.raises(InputError, match="batch 1 of predict_step differs from those before"):
        predict(settings)
    (out,) = tmp_path.glob("out-*")
    assert pq.read_table(out)["label"].to_pylist() == [1] * 16


def test_missing_hooks_are_named(tmp_path):
    check_prediction(settings_of(tmp_path))
    with pytest.raises(
        InputError, match=r"data\.class_path=oddities\.NoPrediction has no predict_dataloader"
    ) as refusal:
        check_prediction(settings_of(tmp_path, data="oddities.NoPrediction"))
    assert "data.class_path=" in refusal.value.hint
    settings = settings_of(tmp_path, model="lightning.pytorch.demos.boring_classes.DemoModel")
    with pytest.raises(InputError, match=r"DemoModel has no predict_step"):
        check_prediction(settings)
