"""`lightning-ring report`: the page of real and of made-up runs, and what the command refuses."""

import importlib.util
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from playwright.sync_api import expect
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring.cli import main as dispatcher
from lightning_ring.monitor import RingMonitor
from lightning_ring.tools.report import (
    choose_metric,
    settings,
    slowest_ranks,
    step_parts,
    write_page,
)
from lightning_ring.tools.report.runs import Fit, read_runs
from tests.monitor.browser import NAMES, executable, open_page
from tests.tools.report.made_up import write_run
from tests.trainers import quiet_trainer

VOID = {"meta", "img", "input", "br"}


class Model(L.LightningModule):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    logger = TensorBoardLogger(tmp_path_factory.mktemp("trained"))
    monitored = {"logger": logger, "log_every_n_steps": 1, "callbacks": [RingMonitor()]}
    trainer = quiet_trainer(max_epochs=2, **monitored)
    batches = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=4)
    trainer.fit(Model(), batches, batches)
    return Path(logger.log_dir)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Run 10 is the best; run 2 has NaN and infinite values."""
    folder = tmp_path_factory.mktemp("sweep")
    rest = {
        "lr-SGD": [0.1, 0.2],
        "ring/forward_ms": [2.0, 4.0],
        "ring/slowest_rank_behind_ms/rank_1": [7.0, 5.0, 9.0],
        "ring/slowest_rank_behind_ms/rank_0": [1.0],
        "best/val/loss": [0.5],
    }
    for name, losses in (("2", [3.0, float("nan"), float("inf"), 2.0]), ("10", [3.0, 0.5, 1.0])):
        write_run(
            folder / name,
            {"train/loss": losses, "val/loss": losses, **rest},
            config=f"optimizer: {{lr: {name}}}\ncallbacks: {{checkpoint: {{monitor: val/loss}}}}\n"
            "seed: 1\n",
            pictures=["val/confusion"],
        )
    return folder


def page_of(*folders, metric=None):
    return write_page(read_runs(folders), metric)


def words(page):
    """What a reader sees."""
    return " ".join(re.sub(r"<style.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL).split())


class Balanced(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.open = []
        self.loaded = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.loaded += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag


def test_a_trained_run_has_every_section_and_asks_for_nothing_else(trained):
    page = page_of(trained)
    parsed = Balanced(page)
    assert parsed.open == []
    assert [
        link for link in parsed.loaded if not link.startswith(("#", "data:image/png;base64,"))
    ] == []
    assert not re.search(r"https?:|url\((?!#)|@import|<script", page)
    text = words(page)
    shown = ("best val_loss", "train_loss", "forward", "finished", "lightning_logs")
    assert [words for words in (*shown, torch.__version__) if words not in text] == []
    assert "width" in text, "hparams.yaml"


def test_runs_are_sorted_by_the_metric_and_what_differs_is_named(sweep):
    runs = read_runs([sweep])
    assert [run.name for run in runs] == ["2", "10"], "numbers by value"
    assert choose_metric(runs, None) == ("val/loss", 1)
    assert settings(runs) == {"optimizer.lr": ["2", "10"]}, "not the seed, which is the same"
    table = words(write_page(runs)).partition("end")[2]
    assert re.search(r"10 10 0\.5 1 1 .* 2 2 2 3 2 ", table)


def test_standing_still_is_no_part_of_a_step(tmp_path):
    write_run(tmp_path, {"ring/forward_ms": [2.0, 4.0], "ring/standstill_ms": [500.0]})
    assert step_parts(read_runs([tmp_path])[0]) == {"forward": 3.0}


def test_the_page_names_slowest_ranks_and_counts_what_no_chart_can_show(sweep):
    assert slowest_ranks(read_runs([sweep])[0]) == [(1, 0.75, 7.0), (0, 0.25, 1.0)]
    page = page_of(sweep)
    text = words(page)
    assert "2 1 75 % of logged steps 7 ms 2 0 25 % of logged steps 1 ms" in text
    assert "2 values are NaN or infinite" in text
    assert not re.search(r'(?:d|cx|cy|x|y)="[^"]*(?:nan|inf)', page)
    assert page.count("data:image/png") == text.count(", step 2") == 2, "the last one of each tag"


def test_another_metric_can_be_asked_for_and_colours_do_not_depend_on_it(sweep):
    for metric, better in (("val/loss", "lower"), ("lr-SGD", "higher")):
        page = page_of(sweep, metric=metric)
        assert f"Sorted by the best {metric} ({better} is better)" in words(page)
        assert re.search(r'show-0" checked>.*?var\(--c0\).*?<span>2 ', page, re.DOTALL)


def test_names_are_escaped(tmp_path):
    for folder in ("<i>a", "b"):
        write_run(tmp_path / folder, {"val_<u>": [1.0]}, config="x: <s>", pictures=["<em>"])
    page = page_of(tmp_path)
    assert not re.search(r"<(i|u|s|em)>", page)
    assert Balanced(page).open == []


@pytest.mark.parametrize(
    "scalars", [{}, {"a": [1.0]}, {"val/x": [float("nan")]}, {"val/loss": [0.0, 1e38, -1e38]}]
)
def test_little_or_extreme_data(tmp_path, scalars):
    write_run(tmp_path / "run", scalars)
    text = words(page_of(tmp_path))
    assert ("No scalars were logged." in text) == (not scalars)
    assert "Not recorded: no run logged step times." in text
    assert "No images were logged." in text


def test_a_run_that_went_on_shows_each_fit_and_the_later_value_of_a_step(trained, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for ranks, value, end in ((4, 1.0, "PeerFailedError: <b>rank 3"), (3, 2.0, None)):
        with SummaryWriter(str(tmp_path)) as writer:
            table = f"| of this fit | |\n|---|---|\n| ranks | {ranks} |"
            writer.add_text("ring/environment", table, 0)
            writer.add_scalar("ring/world_size", ranks, ranks)
            writer.add_scalar("val/loss", value, 5)
            if end is not None:
                writer.add_text("ring/end", end, 5)
                time.sleep(1.1)  # files are named after the second
    (run,) = read_runs([tmp_path])
    assert [(fit.environment["ranks"], fit.end) for fit in run.fits] == [
        ("4", "PeerFailedError: <b>rank 3"),
        ("3", ""),
    ]
    assert run.end == "not recorded: killed, or still running"
    (one,) = run.scalars["val/loss"]
    assert one.value == 2.0
    died = replace(
        run, fits=(Fit(0, {}, "finished"),), scalars=run.scalars | {"ring/deaths": [one]}
    )
    assert died.end == "finished, after 2 rank(s) died", "rank 0 was another process at the end"
    page = write_page([run])
    assert "ring/world_size" in words(page), "it changed"
    assert "PeerFailedError: &lt;b&gt;rank 3" in page
    went_on = write_page([replace(run, fits=(run.fits[1], run.fits[0]))])
    assert "went on below: ranks changed, or it was killed" in words(went_on)


def test_a_damaged_folder_is_read_as_far_as_it_goes(tmp_path):
    write_run(tmp_path, {"val/loss": [1.0] * 50})
    (events,) = tmp_path.glob("*.tfevents.*")
    events.write_bytes(events.read_bytes()[:-300])
    (tmp_path / "hparams.yaml").write_text(
        "c: !!python/object/apply:os.system ['false']\nd: !x {e: 1}\n"
    )
    (run,) = read_runs([tmp_path])
    assert 30 < len(run.scalars["val/loss"]) < 50
    assert run.config == {"c": '["false"]', "d.e": "1"}
    assert run.end == "not recorded: RingMonitor does"
    (tmp_path / "hparams.yaml").write_text("a: [1")
    (run,) = read_runs([tmp_path])
    assert run.config == {"hparams.yaml": "cannot be read: ParserError"}


def test_secrets_are_masked_and_deep_or_endless_files_are_named(tmp_path):
    laughs = "".join(f"- &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 12))
    configs = {
        "a": "logger: {API_Key: k3y, list: [{password: k3y}]}\ntokenizer: gpt2\nn: a token=k3y",
        "b": f"- &a0 [x]\n{laughs}",
        "c": "[" * 10_000,
    }
    for name, config in configs.items():
        write_run(tmp_path / name, {"val/loss": [1.0]}, config=config)
    runs = read_runs([tmp_path])
    assert runs[0].config["tokenizer"] == "gpt2"
    assert runs[1].config == {"hparams.yaml": "cannot be read: ValueError"}
    assert runs[2].config["hparams.yaml"].startswith("cannot be read: ")
    page = page_of(tmp_path / "a")
    assert page.count("***") == 3
    assert "k3y" not in page


def test_a_moved_run_differs_in_no_path(tmp_path):
    for name in ("a", "b"):
        config = f"dirpath: /old/{name}/checkpoints"
        write_run(tmp_path / name, {"val/loss": [1.0]}, config=config)
    assert [run.config for run in read_runs([tmp_path])] == [{"dirpath": "RUN/checkpoints"}] * 2


def test_more_runs_than_can_be_told_apart(tmp_path):
    for number in range(30):
        write_run(tmp_path / f"{number}", {"val/accuracy": [number / 30]})
    page = page_of(tmp_path)
    assert "Charts and pictures show 24 of 30 runs" in words(page)
    assert 'id="show-23"' in page
    assert 'id="show-24"' not in page
    assert "<span>29 <" in page, "the best are drawn"
    assert "<span>5 <" not in page


def refused(capsys, *arguments):
    assert dispatcher.main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_bad_input_is_one_line(sweep, tmp_path, capsys):
    output = tmp_path / "report.html"
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([str(tmp_path / "missing")], "holds no TensorBoard event files"),
        ([str(tmp_path / "empty")], "holds no TensorBoard event files"),
        (
            [str(sweep), "--metric", "beauty"],
            "no run logged it. Logged were: train/loss, val/loss, lr-SGD, best/val/loss.",
        ),
        ([str(sweep), "-o", str(tmp_path / "missing" / "x.html")], "cannot be written"),
    ):
        assert said in refused(capsys, "-o", str(output), *arguments)
    assert not output.exists()


def test_missing_packages_name_the_extra(sweep, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'lightning-ring[monitor]'" in refused(capsys, str(sweep))


def test_the_command_writes_the_page(sweep, tmp_path, capsys):
    output = tmp_path / "page.html"
    arguments = [str(sweep / "2"), str(sweep / "10"), str(sweep), "-o", str(output)]
    assert dispatcher.main(["report", *arguments]) == 0
    assert capsys.readouterr().out == f"{output}: 2 runs, {output.stat().st_size / 1e6:.1f} MB\n"


@pytest.mark.ranks
@pytest.mark.skipif(executable() is None, reason=f"none of {', '.join(NAMES)} is installed")
def test_it_fits_a_phone_and_runs_can_be_hidden(sweep, trained, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(page_of(sweep, trained))
    with open_page(360, 800) as browser:
        browser.goto(page.as_uri())
        element = "document.scrollingElement"
        assert browser.evaluate(f"{element}.scrollWidth - {element}.clientWidth") == 0
        line = browser.locator(".charts .run-0").first
        expect(line).to_be_visible()
        browser.locator("#show-0").click()
        expect(line).to_be_hidden()
        expect(browser.locator("body")).to_have_css("background-color", "rgb(255, 255, 255)")
        browser.emulate_media(color_scheme="dark")
        expect(browser.locator("body")).to_have_css("background-color", "rgb(20, 23, 27)")
