"""Coded updates of real clients: what decoding loses, the memory of error feedback, what is refused, and a real job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from client_site import All, Clinic, Own
from rayps_client.errors import ConfigError
from rayps_client.exchange.coded_vectors import BLOCK, Int8, Malformed, RandomMask, TopK, VectorCoding, Whole, share
from rayps_client.exchange.raw_tensors import RawTensor, decode_tensors, floats_of, raw_of_array, raw_of_floats
from rayps_client.exchange.update_codec import decode_start, decode_update, encode_start, encode_update, most_bytes
from rayps_client.exchange.upload_coding import (
    UpdateCode,
    UploadCoder,
    bytes_of_round,
    download_of,
    update_coding,
    upload_of,
    without_rest,
)
from rayps_client.machine.client_folder import ClientFolder
from rayps_client.trainers.local_trainer import LocalReply, LocalTask, RawTensors, RoundStart
from rayps_client.trainers.torch_tensors import raw_of, tensor_of
from small_work import train

import rayps
from rayps.clients.workload_trainer import WorkloadTrainer
from rayps.federated.round_codings import RoundCodings
from rayps.strategies.catalogue import parse

CODINGS: dict[str, VectorCoding] = {
    "whole": Whole(),
    "int8": Int8(nearest=False),
    "nearest": Int8(nearest=True),
    "top_k": TopK(0.1),
    "mask": RandomMask(0.1),
}
SIZES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]


def vector(n: int, seed: int = 0, kind: str = "float32") -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    return (generator.normal(size=n) * np.exp(generator.normal(size=n))).astype(kind)


# ---- codings


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", CODINGS)
def test_a_coding_takes_the_bytes_that_it_says_and_decodes_a_vector(name: str, n: int) -> None:
    coding, x = CODINGS[name], vector(n)
    before = x.copy()
    parts = coding.encode(x, 3)
    assert sum(part.nbytes for part in parts.values()) == coding.size(n)
    found = coding.decode(parts, n, 3)
    assert found.shape == (n,) and found.dtype == np.float32 and np.array_equal(x, before)
    assert np.array_equal(found, coding.decode(coding.encode(x, 3), n, 3))  # a repeated round gives the same bits
    assert not coding.decode(coding.encode(np.zeros(n, np.float32), 3), n, 3).any()


@pytest.mark.parametrize(("name", "share_of_step"), [("nearest", 0.5), ("int8", 1.0)])
@pytest.mark.parametrize("n", SIZES)
def test_int8_is_wrong_by_at_most_a_part_of_its_blocks_step(name: str, share_of_step: float, n: int) -> None:
    x = vector(n, 1)
    found = CODINGS[name].decode(CODINGS[name].encode(x, 5), n, 5)
    for low in range(0, n, BLOCK):  # the slow twin: block by block
        block, back = x[low : low + BLOCK], found[low : low + BLOCK]
        step = float(np.abs(block).max()) / 127
        assert float(np.abs(block - back).max()) <= share_of_step * step * (1 + 1e-5)
        if name == "nearest":
            assert np.allclose(back, np.rint(block / np.float32(step)) * np.float32(step), rtol=1e-5, atol=1e-6 * step)


@pytest.mark.parametrize("name", ["int8", "mask"])
def test_random_codings_are_right_on_average(name: str) -> None:
    n, draws = 400, 3000
    x, total = vector(n, 2), np.zeros(n)
    for draw in range(draws):
        total += CODINGS[name].decode(CODINGS[name].encode(x, draw), n, draw)
    scale = np.abs(x) * 3 if name == "mask" else np.full(n, np.abs(x).max() / 127 / 2)  # standard deviations
    assert np.abs(total / draws - x).max() < 5 * float(scale.max()) / np.sqrt(draws)


@pytest.mark.parametrize("n", SIZES)
def test_top_k_keeps_the_largest_and_a_mask_what_was_drawn(n: int) -> None:
    x, k = vector(n, 3), share(n, 0.1)
    assert k == max(1, int(0.1 * n))
    kept = TopK(0.1).decode(TopK(0.1).encode(x, 0), n, 0)
    largest = set(sorted(range(n), key=lambda at: -abs(x[at]))[:k])
    assert {int(at) for at in np.flatnonzero(kept)} == largest and all(kept[at] == x[at] for at in largest)
    mask = RandomMask(0.1)
    places, masked = mask.places(n, 7), mask.decode(mask.encode(x, 7), n, 7)
    assert len(set(places.tolist())) == k and places.min() >= 0 and places.max() < n
    assert np.allclose(masked[places], x[places] * (n / k)) and np.count_nonzero(masked) == k


def test_masks_differ_by_round_and_client_and_cover_all_elements() -> None:
    n, mask = 300, RandomMask(0.1)
    codes = [UpdateCode.of(mask, 1, at, client) for at in range(20) for client in range(10)]
    drawn = [frozenset(mask.places(n, code.draw).tolist()) for code in codes]
    assert len(set(drawn)) == len(drawn)
    counts = np.zeros(n)
    for places in drawn:
        counts[list(places)] += 1
    assert counts.min() >= 5 and counts.max() <= 45  # 20 expected
    assert RandomMask(1.0).places(5, 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", CODINGS)
def test_a_vector_that_is_not_finite_is_decoded_as_one(name: str, bad: float) -> None:
    x = vector(600, 4)
    x[np.random.default_rng(1).integers(600)] = bad
    assert not np.isfinite(CODINGS[name].decode(CODINGS[name].encode(x, 9), 600, 9)).all()


def malformed() -> Iterator[tuple[str, str, dict[str, np.ndarray[Any, Any]], str]]:
    n = 600
    for name, coding in CODINGS.items():
        parts = dict(coding.encode(vector(n), 1))
        first = sorted(parts)[-1]
        yield f"{name}: too short", name, {**parts, first: parts[first][:-1]}, "was expected"
        yield f"{name}: another dtype", name, {**parts, first: parts[first].astype(np.int64)}, "was expected"
        yield f"{name}: a part too many", name, {**parts, "zeros": np.zeros(3)}, "has an unknown part 'zeros'"
        yield f"{name}: no part", name, {}, "lacks part"
    top = dict(CODINGS["top_k"].encode(vector(n), 1))
    for why, places in (
        ("twice", np.where(np.arange(60) == 5, top["places"][4], top["places"])),
        ("descending", top["places"][::-1]),
        ("outside", np.where(np.arange(60) == 59, 600, top["places"])),
    ):
        yield f"top_k: {why}", "top_k", {**top, "places": places.astype(np.uint32)}, "do not ascend within the 600"


@pytest.mark.parametrize(("name", "parts", "why"), [pytest.param(*each[1:], id=each[0]) for each in malformed()])
def test_what_is_no_encoding_is_refused_with_a_reason(
    name: str, parts: dict[str, np.ndarray[Any, Any]], why: str
) -> None:
    with pytest.raises(Malformed, match=why):
        CODINGS[name].decode(parts, 600, 1)


def test_bytes_of_half_precision_are_those_of_torch() -> None:
    made = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e3
    made[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38])
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raw = raw_of(made.to(kind))
        wide = torch.float64 if kind == torch.float64 else torch.float32
        assert torch.equal(torch.from_numpy(np.array(floats_of(raw))).nan_to_num(), made.to(kind).to(wide).nan_to_num())
        back = tensor_of(raw_of_floats(made.numpy(), raw))
        assert back.dtype == kind
        assert torch.equal(back.nan_to_num(), made.to(kind).nan_to_num()) and bool(back[0].isnan())


# ---- error feedback


def reply_of(w: np.ndarray[Any, Any], state: RawTensors | None = None) -> LocalReply:
    return LocalReply(raw_of_array(w), {}, {}, state or {}, n=5, steps=2, samples=10, loss=0.5)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_decoded_updates_and_the_rest_are_the_sum_of_all_updates(kind: str) -> None:
    n, strategy, state = 500, {"upload": "top_k:0.05"}, RawTensors()
    sent, true = np.zeros(n), np.zeros(n)
    for at in range(40):
        w_t, update = vector(n, 100 + at, kind), vector(n, at, kind)
        reply = reply_of(w_t + update)
        coder = UploadCoder.of(strategy, 3, at, 0, state=dict(state))
        parts = coder.coded(reply, raw_of_array(w_t))
        assert parts is not None and coder.code is not None
        sent += coder.code.decoded(parts, n)
        true += (w_t + update) - w_t
        state = reply.state
        rest = floats_of(state["upload/rest"]).astype(np.float64)
        assert np.abs(sent + rest - true).max() < (1e-4 if kind == "float32" else 1e-12) and rest.any()
    assert without_rest({**state, "c": state["upload/rest"]}).keys() == {"c"}


def test_a_rejected_or_repeated_round_takes_its_rest_back(tmp_path: Path) -> None:
    folder, strategy = ClientFolder(tmp_path), {"name": "fedavg", "upload": "top_k:0.1"}

    def trained(at: int, serial: int, starts: list[list[int]], seed: int) -> dict[str, bytes]:
        state = folder.load_state(at, "fedavg", starts)
        reply = reply_of(vector(50, seed))
        parts = UploadCoder.of(strategy, 1, at, 0, state=state).coded(reply, raw_of_array(np.zeros(50, np.float32)))
        assert parts is not None and "upload/rest" not in state
        folder.save_state(at, serial, "fedavg", reply.state, 0)
        return {name: bytes(raw.data) for name, raw in parts.items()}

    first, second = trained(0, 1, [[0, 1]], 7), trained(1, 2, [[0, 1]], 8)
    folder.delete_state(1)  # the job has rejected it
    assert trained(1, 3, [[0, 1]], 8) == second
    assert trained(0, 4, [[0, 1], [0, 4]], 7) == first  # the job has begun again
    assert trained(1, 5, [[0, 1], [0, 4]], 8) == second
    assert second != {
        name: bytes(raw.data)
        for name, raw in (
            UploadCoder.of(strategy, 1, 1, 0, state={}).coded(
                reply_of(vector(50, 8)), raw_of_array(np.zeros(50, np.float32))
            )
            or {}
        ).items()
    }
    folder.close()


# ---- messages


LAYOUT = [("a", [3, 100], "float32"), ("b", [7], "float32")]


def test_without_options_messages_are_as_before() -> None:
    w = raw_of_array(vector(307))
    assert update_coding({"name": "fedavg"}) is None and RoundCodings(rayps.FedAvg()).update is None
    assert encode_start(RoundStart(w), LAYOUT, coding=None) == encode_start(RoundStart(w), LAYOUT)
    reply = reply_of(vector(307))
    assert UploadCoder.of({}, 0, 0, 0, state={}).coded(reply, w) is None and reply.state == {}
    raw = encode_update(reply)
    assert raw == encode_update(reply, None) and decode_tensors(raw).keys() == {"w"}
    assert most_bytes(w, ("c",), {}) == 2 * w.nbytes + (1 << 20)
    assert bytes_of_round(5000, LAYOUT, {}) == 10_000


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("upload", [None, "int8", "top_k:0.1", "mask:0.5"])
def test_clients_train_from_decoded_parameters_and_the_job_adds_updates_to_its_own(
    upload: str | None, kind: str
) -> None:
    layout = [(name, shape, kind) for name, shape, _ in LAYOUT]
    w_t = raw_of(torch.from_numpy(vector(307, 1)).to(getattr(torch, kind)))
    strategy = {"upload": upload, "download": "int8"}
    raw = encode_start(RoundStart(w_t, {"c": w_t}), layout, coding=download_of("int8"))
    assert decode_tensors(raw).keys() == {"w/scales", "w/steps", "shared/c"}
    start = decode_start(raw, layout)
    coarse, fine = floats_of(start.w), floats_of(w_t)
    assert start.w.kind == w_t.kind and start.shared["c"] == w_t and not np.array_equal(coarse, fine)
    assert np.abs(coarse - fine).max() <= np.abs(fine).max() / 127
    reply = reply_of(np.zeros(307))
    reply.w = raw_of_floats(coarse + vector(307, 2), w_t)
    coder = UploadCoder.of(strategy, 4, 6, 1, state={})
    parts = coder.coded(reply, start.w)
    coding = update_coding(strategy)
    assert parts is not None and coder.code is not None and coding is not None
    sent = encode_update(reply, parts)
    assert len(sent) <= most_bytes(w_t, (), {}, coding)
    found = decode_update(sent, w_t, (), {}, 9, code=UpdateCode.of(coding, 4, 6, 1))
    assert isinstance(found, LocalReply) and found.w.kind == w_t.kind
    update = coder.code.decoded(parts, 307)  # of w_k minus the decoded parameters
    assert found.w == raw_of_floats(fine + update, w_t)
    if upload is None:
        assert np.array_equal(update, floats_of(reply.w) - coarse)


def test_an_update_in_another_coding_is_rejected_with_a_reason() -> None:
    w_t = raw_of_array(vector(307))
    code = UpdateCode.of(TopK(0.1), 1, 0, 0)

    def why(tensors: dict[str, RawTensor]) -> str:
        found = decode_update(encode_update(reply_of(vector(307)), tensors), w_t, (), {}, 9, code=code)
        assert isinstance(found, str)
        return found

    right = code.encode(vector(307))
    assert why({}) == "its update lacks part 'places'"
    assert why(UpdateCode.of(Int8(False), 1, 0, 0).encode(vector(307))).startswith("its update lacks part 'places'")
    assert why({**right, "places": raw_of(torch.zeros(30, dtype=torch.bfloat16))}).endswith("of an unknown dtype")
    assert "(30,) was expected" in why({**right, "values": raw_of_array(np.zeros(29, np.float32))})
    plain = decode_update(encode_update(reply_of(vector(307))), w_t, (), {}, 9, code=code)
    assert str(plain).startswith("its update has parameters, but the job's clients code their updates")
    coded = encode_update(reply_of(vector(307)), right)
    assert decode_update(coded, w_t, (), {}, 9) == "its update has an unknown 'update/places'"


def test_the_bytes_of_a_round_follow_the_codings() -> None:
    plain = 307 * 4
    others = 900  # of the message, beside w
    assert bytes_of_round(plain + others, LAYOUT, {"upload": "int8"}) == plain + 307 + 8 + 2 * others
    both = {"upload": "top_k:0.1", "download": "int8"}
    assert bytes_of_round(307 + 8 + others, LAYOUT, both) == 307 + 8 + 8 * 30 + 2 * others


# ---- options


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ("fedavg:upload=int4,clients=remote", "upload", "upload is 'int4': give int8, top_k:SHARE"),
        ("fedavg:upload=top_k:0,clients=remote", "upload", "above 0 and up to 1"),
        ("fedavg:upload=mask:2,clients=remote", "upload", "above 0 and up to 1"),
        ("fedavg:upload=int8:0.5,clients=remote", "upload", "leave upload out"),
        ("fedavg:upload=mask:x,clients=remote", "upload", "above 0 and up to 1"),
        ("fedavg:download=top_k,clients=remote", "download", "give int8"),
        ("fedavg:upload=int8", "upload", "the clients are simulated"),
        ("fedbuff:buffer=2,upload=top_k,clients=remote", "upload", "give upload=int8 or upload=mask"),
        ("fedavg:download=int8", "download", "the clients are simulated"),
        *(
            (
                f"fedavg:upload={name},clients=remote(least=2),secure=secagg(clip=1)",
                "upload",
                "each client has a mask of its",
            )
            for name in ("int8", "top_k", "mask:0.1")
        ),
    ],
)
def test_what_cannot_be_coded_is_refused_with_a_way_out(text: str, field: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as found:
        parse(text)
    assert found.value.data["field"] == field


def test_options_in_their_three_forms() -> None:
    text = "fedadam:upload=top_k:0.02,download=int8,clients=remote(least=2)"
    strategy: Any = parse(text)[0].strategy
    assert parse(strategy.to_wire())[0].strategy == strategy
    remote = {"name": "remote", "least": 2}
    assert rayps.FedAdam(upload="top_k:0.02", download="int8", clients=remote).to_wire() == strategy.to_wire()
    assert "upload" not in rayps.FedAvg().to_wire()
    codings = RoundCodings(strategy)
    assert codings.update is not None and codings.update.size(1000) == 8 * 20
    code = codings.update_code({"seed": 5, "phase": 3, "round": 2}, 1)
    assert code is not None and code.draw == UpdateCode.of(TopK(0.02), 5, 5, 1).draw
    parse("fedbuff:buffer=2,upload=mask,download=int8,clients=remote")
    parse("fedavg:download=int8,clients=remote(least=2),secure=secagg(clip=1.0)")
    parse("fedavg:upload=int8,clients=remote,privacy=dp(noise_multiplier=1.0,clip=1.0,sampling=all)")
    assert upload_of("top_k").size(1000) == 8 * 50 and upload_of("mask").size(1000) == 4 * 100  # type: ignore[union-attr]


# ---- a real job


class Still(All):
    """A job that ends with the parameters with which it began."""

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.0)


def by_hand(strategy: dict[str, Any], rounds: int, seed: int) -> torch.Tensor:
    """The parameters of the same job, computed here: two clients, and the codings of their messages."""
    trainers = [WorkloadTrainer(Own(k), Own(k).data()) for k in range(2)]
    coding, states = update_coding(strategy), [RawTensors(), RawTensors()]
    assert coding is not None
    w_t = train(Still(2), "fedavg", epochs=1, seed=seed).snapshot.params
    for t in range(rounds):
        raw = encode_start(RoundStart(raw_of(w_t)), trainers[0].layout(), coding=download_of(strategy["download"]))
        start, total, samples = decode_start(raw, trainers[0].layout()), torch.zeros_like(w_t), 0
        for k, trainer in enumerate(trainers):
            coder = UploadCoder.of(strategy, seed, t, k, state=states[k])
            reply = trainer.train(LocalTask(strategy, seed, t, k, t, start=start, state={}))
            parts = coder.coded(reply, start.w)
            assert parts is not None and coder.code is not None
            states[k] = reply.state
            decoded = coder.code.decoded(parts, w_t.numel()).astype(np.float64)
            total += reply.n * torch.from_numpy(decoded)
            samples += reply.n
        w_t = w_t + total / samples
    return w_t


def test_private_layers_stay_out_of_a_coded_update() -> None:
    strategy: Any = parse("fedper:private=2,upload=top_k:0.1,clients=remote")[0].strategy.to_wire()
    trainer = WorkloadTrainer(Own(0), Own(0).data())
    w_t = raw_of(trainer.trainer.flat.vector.clone())
    reply = trainer.train(LocalTask(strategy, 1, 0, 0, 0, start=RoundStart(w_t), state={}))
    assert reply.start is not None and (reply.w.elements, reply.start.elements, w_t.elements) == (42, 42, 50)
    assert np.array_equal(reply.start.array(), w_t.array()[:42])
    coder = UploadCoder.of(strategy, 1, 0, 0, state={})
    parts = coder.coded(reply, reply.start)
    assert parts is not None and coder.code is not None and np.count_nonzero(coder.code.decoded(parts, 42)) == 4
    found = decode_update(encode_update(reply, parts), reply.start, (), {}, 20, code=coder.code)
    assert isinstance(found, LocalReply) and found.w.kind == reply.w.kind


class Killed(httpx2.BaseTransport):
    """A client's line that ends, with all that the client says later, at its update of order `serial`."""

    def __init__(self, serial: int, arrives: bool) -> None:
        self._inner, self._serial, self._arrives, self._ended = httpx2.HTTPTransport(), serial, arrives, False

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        ends = request.method == "PUT" and request.url.path.endswith(f"/rounds/{self._serial}/update")
        if self._ended or (ends and not self._arrives):
            self._ended = True
            raise RuntimeError("killed")
        answer = self._inner.handle_request(request)
        if ends:
            answer.read()
            self._ended = True
            raise RuntimeError("killed")
        return answer

    def close(self) -> None:
        self._inner.close()


def test_a_job_with_coded_updates_computes_what_its_messages_say(clinic: Clinic) -> None:
    text = "fedavg:local_epochs=1,upload=top_k:0.2,download=int8,clients=remote(least=2,wait=100)"
    job = clinic.job(text, rounds=4, seed=5)
    killed = [
        Killed(2, arrives=True),
        Killed(3, arrives=False),
    ]  # what they have sent counts once, and their memory too
    begun = [clinic.hospital(job, k, transport=killed[k]).begin() for k in range(2)]
    again = []
    for hospital in begun:
        assert str(hospital.over().error) == "killed"
        hospital.end()
        again.append(clinic.hospital(job, begun.index(hospital)).begin())
    learnt = clinic.trained(job)
    assert [hospital.over().ended.rounds for hospital in again] == [3, 2]
    box = clinic.service.mailbox(job.id)
    order = box.newest()
    assert order is not None and order.facts["parameters"]["bytes"] < 1000  # 50 parameters of float64 in int8
    assert "upload/rest" in again[0].folder.load_state(9, "fedavg", box.known_starts())
    assert torch.allclose(learnt, by_hand({**order.facts["strategy"]}, 4, 5), rtol=1e-9, atol=1e-12)


def test_a_state_is_dropped_with_the_update_that_did_not_arrive(tmp_path: Path) -> None:
    folder, state = ClientFolder(tmp_path), {"c": raw_of_array(vector(3))}
    for serial, at, counts in ((1, 0, True), (2, 1, False)):
        folder.start_order(serial)
        folder.start_sending(serial, at)
        folder.save_state(at, serial, "fedavg", state, 0)
        assert folder.load_state(at + 1, "fedavg", []) == state
        folder.close()
        folder = ClientFolder(tmp_path)  # the client was killed here
        assert folder.sending == (serial, at) and folder.finished == serial - 1
        folder.finish_order(serial, at if counts else None)
        assert folder.sending is None and folder.last == (at if counts else None)
    assert sorted(path.name for path in tmp_path.glob("state-*")) == ["state-0.safetensors"]
    folder.close()


def test_asynchronous_rounds_with_coded_updates_are_near_those_without(clinic: Clinic) -> None:
    job = clinic.job("fedbuff:buffer=1,upload=int8,download=int8,clients=remote(least=1,wait=100)", rounds=3, seed=5)
    (hospital,) = clinic.hospitals(job, 1)
    learnt = clinic.trained(job)
    assert hospital.over().ended.rounds >= 3
    begun, plain = (train(work(1), "fedbuff:buffer=1", epochs=3, seed=5).snapshot.params for work in (Still, All))
    assert float((learnt - plain).norm()) < 0.1 * float((begun - plain).norm())
