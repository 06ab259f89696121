"""How workers share machines."""

from __future__ import annotations

import pytest

from search.workers.layout import Layout, capacity, follow, plan_layout

LAPTOP = [{"CPU": 2.0}]
SERVER = [{"CPU": 32.0, "GPU": 8.0}]


def test_on_a_cpu_workers_share_the_cores() -> None:
    assert plan_layout(LAPTOP) == Layout(workers=2, gpus=0, cpus=1.0, threads=1)
    assert plan_layout(LAPTOP, workers=1).threads == 2
    assert plan_layout(LAPTOP, workers=4) == Layout(workers=4, gpus=0, cpus=0.5, threads=1)
    assert plan_layout([{"CPU": 64.0}]) == Layout(workers=4, gpus=0, cpus=16.0, threads=16)
    assert plan_layout(LAPTOP).device == "cpu"


def test_each_gpu_gets_a_worker() -> None:
    layout = plan_layout(SERVER)
    assert (layout.workers, layout.gpus, layout.threads) == (8, 1.0, 4)
    assert layout.device == "cuda"
    assert plan_layout(SERVER, workers=3).workers == 3


@pytest.mark.parametrize(("share", "workers"), [(0.5, 16), (0.1, 80), (0.3, 24)])
def test_a_fraction_packs_workers_on_each_gpu(share: float, workers: int) -> None:
    layout = plan_layout(SERVER, gpus_per_worker=share)
    assert (layout.workers, layout.device) == (workers, "cuda")


def test_more_than_one_gpu_shards_the_model_within_a_node() -> None:
    nodes = [{"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 3.0}]
    layout = plan_layout(nodes, gpus_per_worker=2)
    assert (layout.workers, layout.device) == (2, "auto")


def test_no_gpu_can_be_asked_for_where_there_are_some() -> None:
    assert plan_layout(SERVER, gpus_per_worker=0).device == "cpu"


@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        ([1] * 8, None, Layout(4, 0, 1.0, 1)),  # two cores are nowhere to be had
        ([2, 2, 2], None, Layout(4, 0, 1.0, 1)),
        ([8, 8], None, Layout(4, 0, 4.0, 4)),
        ([0, 16], None, Layout(4, 0, 4.0, 4)),
        ([4, 2], 3, Layout(3, 0, 2.0, 2)),
        ([1, 1], 5, Layout(5, 0, 1 / 3, 1)),
    ],
)
def test_on_several_nodes_no_worker_needs_two_of_them(
    cores: list[int], workers: int | None, expected: Layout
) -> None:
    assert plan_layout([{"CPU": float(n)} for n in cores], workers) == expected


def test_a_cluster_holds_what_each_of_its_nodes_holds() -> None:
    small, one = Layout(4, 0, 2.0, 2), Layout(8, 1.0, 0, 4)
    assert capacity([{"CPU": 8.0}], small) == 4
    assert capacity([{"CPU": 8.0}, {"CPU": 3.0}, {"CPU": 1.0}, {}], small) == 4 + 1
    assert capacity([{"CPU": 8.0}, {"CPU": 64.0}], small) == 4 + 4  # each holds the whole model
    assert capacity([*SERVER, {"CPU": 8.0, "GPU": 2.0}, *LAPTOP], one) == 8 + 2
    assert capacity(SERVER, Layout(8, 0.3, 0, 1)) == 24


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([8, 8, 8], 4),  # as planned
        ([8, 8], 4),  # of the room for 6 that for 4 is left
        ([8], 2),
        ([], 1),
        ([8, 8, 8, 8], 4 + 2),
        ([8, 8, 64], 4 + 2),
    ],
)
def test_workers_follow_nodes_but_stay_where_the_rest_holds_them(
    cores: list[float], expected: int
) -> None:
    first = [{"CPU": 8.0}] * 3
    layout = plan_layout(first)
    assert (layout.workers, capacity(first, layout)) == (4, 6)
    now = capacity([{"CPU": n} for n in cores], layout)
    assert follow(layout, capacity(first, layout), now) == expected


@pytest.mark.parametrize(
    ("nodes", "workers", "share", "expected"),
    [
        (LAPTOP, None, 1.0, "1 workers with 1 GPUs each do not fit on 0 GPUs"),
        (SERVER, 9, None, "9 workers with 1 GPUs each do not fit on 8 GPUs"),
        (SERVER, None, 16.0, "16 GPUs each do not fit on 8 GPUs"),
        (SERVER, None, 1.5, "use a whole number, or a part of one GPU"),
    ],
)
def test_workers_that_do_not_fit_are_refused(
    nodes: list[dict[str, float]], workers: int | None, share: float | None, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        plan_layout(nodes, workers, share)
