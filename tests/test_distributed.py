"""Several gloo processes measure and train what one does; what fails on one stops all."""

import pytest
import torch
from torch import nn

import newton_summary as ns
from distributed_cases import (
    KINDS,
    MEASUREMENTS,
    SHARDED,
    draw,
    everything,
    language_model,
    loss_fn,
    make_net,
    next_token_loss,
    numbers,
    train,
)
from ranks import run_once

pytestmark = pytest.mark.slow  # two processes and then four do all of it first
FIELDS = ("loss", "gbar", "Hbar", "D3")
MEETING = ("all_reduce", 24)  # whether all ranks are well, and at the same place


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two ranks found out, all tests in one start."""
    return run_once(everything, 2, tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_once(numbers, 4, tmp_path_factory)


@pytest.fixture(params=[2, 4])
def ranks(request):
    return request.getfixturevalue("two" if request.param == 2 else "four")


def summaries(ranks, key, name):
    states = [rank[key] if key == "measured" else rank[key]["summaries"] for rank in ranks]
    return [ns.Summary.from_state_dict(state[name]) for state in states]


def assert_equal_to_one(found, whole, fields=FIELDS):
    """All ranks have the same to the last bit, and that of one process to 1e-12."""
    for name in fields:
        expected = getattr(whole, name)
        if expected is None:
            assert all(getattr(summary, name) is None for summary in found)
            continue
        for summary in found:
            assert torch.equal(getattr(summary, name), getattr(found[0], name))
        scale = float(expected.abs().max())
        torch.testing.assert_close(getattr(found[0], name), expected, rtol=0, atol=1e-12 * scale)
    assert {summary.num_samples for summary in found} == {whole.num_samples}


# --- measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_ranks_measure_what_one_process_does(ranks, name):
    """Shards of different sizes are weighted."""
    whole = ns.summarize(make_net(), loss_fn, draw(1, 13), **MEASUREMENTS[name])
    assert_equal_to_one(summaries(ranks, "measured", name), whole)


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_parameters_give_the_same(ranks, name):
    """FSDP2: exact, although no rank has the model."""
    whole = ns.summarize(make_net(), loss_fn, draw(1, 13), **SHARDED[name])
    assert_equal_to_one(summaries(ranks, "sharded", name), whole)


def test_ranks_may_have_different_numbers_of_batches(ranks):
    """Also none at all. Standard errors are those of the batches of all ranks."""
    whole = draw(1, 13)
    batches = [tuple(t[i : i + 2] for t in whole) for i in range(0, 13, 2)]
    one = ns.summarize(make_net(), loss_fn, batches, stderr=True)
    found = summaries(ranks, "measured", "unequal batches")
    assert_equal_to_one(found, one, (*FIELDS, "gbar_stderr", "Hbar_stderr"))
    assert len(found[0].parts) == len(one.parts) == 7


@pytest.mark.parametrize("name", ["empty list", "empty batch"])
def test_a_rank_without_data_counts_nothing(ranks, name):
    """The last rank has no sample, the others all of them."""
    one = ns.summarize(make_net(), loss_fn, draw(1, 13))
    found = summaries(ranks, "measured", name)
    assert found[0].num_samples == 13 * (len(ranks) - 1)
    torch.testing.assert_close(found[-1].Hbar, one.Hbar, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[-1].D3, one.D3, rtol=1e-12, atol=1e-15)


def test_errors_come_from_all_ranks(two):
    """With stderr the parts of all ranks are there, the same on each."""
    found = summaries(two, "measured", "errors")
    assert [part.num_samples for part in found[0].parts] == [1, 12]
    assert torch.equal(found[0].Hbar_stderr, found[1].Hbar_stderr)


# --- wrapped modules ------------------------------------------------------------------------------


def test_a_wrapped_module_is_measured_unwrapped(two):
    """Names and the module given to the loss are those inside; no hook fires, no buffer is sent."""
    for rank in two:
        seen = rank["wrapped"]
        assert seen["names"][0] == "0.weight"
        assert set(seen["kinds"]) == {"Sequential"}
        assert set(seen["collectives"]) <= {"all_gather_object", "all_reduce"}
        assert seen["reductions"] == (0, 3)  # none while measuring, one for each training step
        assert seen["unmoved"] and seen["verified"]
        assert torch.equal(seen["same"], seen["summary"])  # through the wrapper, in the loss


def test_wrapped_modules_stay_equal(two):
    """Advice and training steps with a closure are the same on both ranks."""
    first, second = (rank["wrapped"] for rank in two)
    assert first["factors"] == second["factors"] and first["stderr"] == second["stderr"]
    assert all(torch.equal(a, b) for a, b in zip(first["params"], second["params"]))


# --- training -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_alone():
    return {kind: train(make_net(), kind, lambda batch: batch) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_training_is_that_of_one_process(two, trained_alone, how, kind):
    """To 1e-10, and to the last bit the same on both ranks."""
    compare_training([rank["trained"][how, kind] for rank in two], trained_alone[kind])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_training_on_four_ranks(four, trained_alone, how):
    compare_training([rank["trained"][how, "default"] for rank in four], trained_alone["default"])


def compare_training(found, one):
    start = make_net().parameters()
    assert any((a - b).abs().max() > 0.01 for a, b in zip(one["params"], start))  # it has moved
    for rank in found:
        assert torch.equal(rank["eta"], found[0]["eta"])
        for p, first, expected in zip(rank["params"], found[0]["params"], one["params"]):
            assert torch.equal(p, first)
            torch.testing.assert_close(p, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["default", "paper", "adam"])
def test_a_refresh_is_one_collective_and_other_steps_are_none(two, kind):
    """Under DDP, whose own all-reduce of gradients is not counted."""
    for rank in two:
        steps = rank["trained"]["ddp", kind]["steps"]
        S = len(make_net().state_dict())
        assert sum(refreshes for refreshes, _ in steps) >= 5
        for refreshes, calls in steps:
            if kind == "paper":
                assert calls == [MEETING, message(S)] * refreshes
            else:  # which searches for the first step, and looks at more than a summary
                assert bool(calls) == bool(refreshes)


@pytest.mark.parametrize("kind", ["default", "paper", "weight decay"])
def test_a_step_takes_one_number_under_fsdp(two, kind):
    """Whether it is finite; before a refresh of the paper's algorithm, also whether it is zero."""
    for rank in two:
        steps = rank["trained"]["fsdp", kind]["steps"]
        start = next(i for i, (refreshes, _) in enumerate(steps) if refreshes)
        for refreshes, calls in steps[start:]:
            sums = calls.count(("all_reduce", 8))
            if kind == "paper":
                assert sums == 1 + bool(refreshes) or not calls
            else:
                assert sums == 1


def message(S):
    """What a rank sends of a summary: gbar, Hbar, D3, loss, samples, norm of u and its square."""
    return "all_reduce", 8 * (S * S + 2 * S + 4)


def test_bytes_of_a_refresh(two):
    found = two[0]["bytes"]
    for spec in ("canonical", "weights-biases", "blocks-2", "trivial"):
        S, calls = found[spec]
        assert calls == [MEETING, message(S)]
    # Along the gradient: the arguments, whether ranks do the same, with the same values; the
    # number of samples, each tensor, the summary.
    S, calls = found["gradient"]
    tensors = [("all_reduce", 8 * p.numel()) for p in make_net().parameters()]
    agreement = [MEETING, MEETING, ("all_reduce", 8 * 3 * S)]
    assert calls == [*agreement, MEETING, ("all_reduce", 8), *tensors, MEETING, message(S)]


# --- sharded parameters ---------------------------------------------------------------------------


def test_measuring_sharded_parameters_leaves_no_trace(two):
    """Values, gradients and the hooks of fully_shard are as before."""
    assert all(rank["sharded"]["no trace"] for rank in two)
    whole = ns.summarize(make_net(), loss_fn, draw(1, 13))
    assert_equal_to_one(summaries(two, "sharded", "after a forward pass"), whole)
    assert two[0]["sharded"]["factors"] == two[1]["sharded"]["factors"]
    net, batches = make_net(), [draw(1, 13)] * 2
    adam = torch.optim.Adam(net.parameters())
    alone = ns.suggest_lrs(net, loss_fn, batches, adam, "canonical").rehearsal
    assert two[0]["sharded"]["rehearsal"] == pytest.approx(alone, rel=1e-10)


def test_other_sharded_models(two):
    """Convolutions, attention with tied weights, parametrisations, norms, and frozen layers."""
    for rank in two:
        assert len(rank["sharded"]["others"]) == 5
        assert max(rank["sharded"]["others"].values()) < 1e-12


@pytest.mark.parametrize("texts", ["as many", "more"])
def test_a_sharded_language_model_is_passed_in_pieces(two, texts):
    """Logits, attentions and tokens, where all ranks have tapes of the same shapes."""
    model, whole = language_model()
    alone = ns.summarize(model, next_token_loss, whole)
    assert_equal_to_one(
        [ns.Summary.from_state_dict(rank["sharded"]["pieces"][texts][0]) for rank in two], alone
    )
    for rank in two:
        calls = rank["sharded"]["pieces"][texts][1]
        if texts == "as many":
            assert calls["pass_in_pieces"] == 1 and calls["pass_tokens"] >= 4
        else:
            assert not calls


def test_sharded_training_goes_on_bit_for_bit(two):
    """Each rank writes and reads its own shards with torch.save and torch.load."""
    assert all(rank["sharded"]["resumed"] for rank in two)


def test_steps_are_tried_on_sharded_models(two):
    """With the real change of the loss of all ranks."""
    net = make_net()
    summary = ns.summarize(net, loss_fn, draw(1, 13))
    for trial, *others in zip(
        ns.step_trials(net, loss_fn, draw(1, 13), summary), *(r["sharded"]["trials"] for r in two)
    ):
        for other in others:
            assert other.real == pytest.approx(trial.real, rel=1e-9)
            assert other.predicted == pytest.approx(trial.predicted, rel=1e-9)


def test_no_rank_gathers_the_whole_model(two):
    """Of 24 tensors a few are whole at a time."""
    for rank in two:
        most, everything_there_is = rank["sharded"]["wholes"]
        assert 0 < most < everything_there_is / 2


def test_mistakes_with_sharded_parameters(two):
    """They are told on all ranks alike."""
    first, second = (rank["sharded"]["errors"] for rank in two)
    assert first == second
    assert "over a mesh of shape (1, 2): only fully_shard over all ranks" in first["mesh"][1]
    assert "Use smaller batches" in first["microbatch"][1]
    for name in ("verify", "derivative_tensor", "taylor_terms"):
        assert f"is sharded, but {name} takes whole models only" in first[name][1]
    assert "only the sweep" in first["backend"][1]
    assert "all ranks must take part" in first["alone"][1]
    assert "rank 0 has fewer" in first["batches"][1]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raises", "KeyError: 'no such label'"),
        ("raises along u", "KeyError: 'no such label'"),
        ("loader", "OSError: the disk is gone"),
        ("generator", "OSError: the disk is gone"),
        ("curvature", "OSError: the disk is gone"),
        ("empty curvature", "The curvature loader is empty"),
        ("refresh", "KeyError: 'no such label'"),
        ("argument", "order=4: expected 1, 2 or 3"),
    ],
)
def test_a_rank_that_fails_stops_all_and_is_named(two, name, text):
    """The rank itself shows the error as the cause."""
    for rank in two:
        kind, message, cause = rank["failed"][name]
        assert kind == "RankError"
        assert message.startswith("Rank 1 of 2: ") and text in message
        assert (cause != "NoneType") == (rank is two[1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raises", "KeyError: 'no such label'"),
        ("halfway", "ValueError: invalid literal for int()"),
        ("halfway along u", "ValueError: invalid literal for int()"),
        ("swallowed", "KeyError: 'no such label'"),
        ("backward", "KeyError: 'no way back'"),
        ("backward along u", "LookupError: backward"),
        (
            "in the sweep",
            "'linear' is called in a way that its rule does not support: in the sweep",
        ),
        ("at the end", "LookupError: at the end"),
        ("second batch", "OSError: the disk is gone"),
        ("not finite", "The loss is nan"),
        ("curvature", "OSError: the disk is gone"),
        ("refresh", "KeyError: 'no such label'"),
    ],
)
def test_with_sharded_parameters_nobody_waits_for_a_rank_that_failed(two, name, text):
    """Wherever it fails: the others are about to gather, to add up, or to tell each other."""
    for rank in two:
        kind, message, cause = rank["sharded"]["failed"]["errors"][name]
        assert kind == ("RankNotFiniteError" if name == "not finite" else "RankError")
        assert message.startswith("Rank 1 of 2: ") and text in message
        assert (cause != "NoneType") == (rank is two[1])


def test_ranks_on_different_paths_through_a_sharded_model(two):
    for rank in two:
        errors = rank["sharded"]["failed"]["errors"]
        kind, message, _ = errors["other path"]
        assert kind == "RankError"
        assert "rank 0 has reached the gathering of 2.weight, (5,), but rank 1 the" in message
        assert "order is 2 on rank 0 and 3 on rank 1" in errors["order"][1]
        assert abs(float(rank["sharded"]["failed"]["and then"]) - expected_loss()) < 1e-12


def test_an_interrupt_stays_one_and_stops_the_others(two):
    for failed in ("failed", "sharded"):
        first, second = (
            rank[failed] if failed == "failed" else rank[failed]["failed"]["errors"] for rank in two
        )
        assert first["interrupt"][:2] == ("RankError", "Rank 1 of 2: KeyboardInterrupt")
        assert second["interrupt"][0] == "KeyboardInterrupt"
    # One that comes while a message is under way keeps nobody waiting for another message.
    first, second = (rank["failed"]["waiting"] for rank in two)
    assert first is None and second[0] == "KeyboardInterrupt"


def test_a_meeting_before_every_gathering(two):
    """24 bytes each, and none beyond those of the sharded parameters and of the summary."""
    calls = two[0]["sharded"]["failed"]["calls"]
    S = len(make_net().state_dict())
    assert calls[-1] == message(S)
    meetings = [size for name, size in calls[:-1] if name == "all_reduce"]
    assert set(meetings) == {24}
    # The arguments, that they are the same, and the direction; whether there is a batch, the
    # shapes of the tape, in how many parts to sweep, that there are no more batches; and the end.
    others = 3 + 4 + 1
    assert len(meetings) == two[0]["sharded"]["failed"]["gathered"] + others


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("order", "order is 2 on rank 0 and 3 on rank 1"),
        ("groups", "in group '0.weight' on rank 0 and torch.float64 (5, 4) in group 'all' on rank"),
        ("model", "parameter '0.weight' is torch.float64 (5, 4) in group '0.weight' on rank 0 and"),
        ("stderr", "stderr is False on rank 0 and True on rank 1"),
        ("kind", "direction is gradient on rank 0 and given on rank 1"),
        ("values", "The ranks differ in the values of parameter '4.weight'"),
        ("direction", "The ranks differ in the values of the direction of '0.bias'"),
        ("optimizer", "summary_period is 10 on rank 0 and 11 on rank 1"),
        ("diagonal", "diagonal is False on rank 0 and True on rank 1"),
        ("gradients, canonical", "The ranks differ in the values of the direction"),
        ("gradients, weights-biases", "The ranks differ in the values of the direction"),
        ("gradients, trivial", "The ranks differ in the values of the direction"),
    ],
)
def test_ranks_that_are_about_to_do_different_things(two, name, text):
    """They are told before they start: messages of different lengths would end the processes."""
    for rank in two:
        kind, message, _ = rank["failed"]["differences"][name]
        assert kind == "RankError" and text in message


def test_groups_of_processes(two):
    """A group of one works alone; a process outside of the group is told so."""
    for number, rank in enumerate(two):
        own, (kind, message, _) = rank["failed"]["subgroups"]
        assert own == 12
        assert (
            kind == "ValueError" and f"process group that rank {number} does not belong" in message
        )


@pytest.mark.parametrize("name", ["nan", "nan along u"])
def test_a_loss_that_is_not_finite_stops_all(two, name):
    for rank in two:
        kind, message, _ = rank["failed"][name]
        assert kind == "RankNotFiniteError"
        assert message.startswith("Rank 1 of 2: The loss is nan")


def test_a_refresh_without_a_finite_loss_is_skipped_on_all(two):
    """As on one process; the warning names the rank."""
    for rank in two:
        failed, message = rank["failed"]["nan in a refresh"]
        assert failed == 1 and "Rank 1 of 2: The loss is nan" in message


def test_what_fails_alike_on_all_ranks_is_told_as_it_is(two):
    for rank in two:
        assert rank["failed"]["no data"][:2] == (
            "ValueError",
            "The data is empty on all ranks: there is no batch to measure.",
        )
        assert rank["failed"]["alike"][0] == "ValueError"
        assert rank["failed"]["alike"][1].startswith("Unknown direction 'downhill'")


def expected_loss():
    return float(loss_fn(make_net(), draw(1)).detach())


def test_ranks_are_in_step_after_failures(two):
    assert all(abs(float(rank["failed"]["and then"]) - expected_loss()) < 1e-12 for rank in two)


def test_time_outs_are_passed_through(two):
    """A group with a time-out of a second, in which only rank 0 measures."""
    error, seconds = two[0]["waited"]
    assert error[0] == "RankError" and error[1].startswith(
        "Rank 0 of 2 timed out waiting for the other ranks"
    )
    assert "init_process_group(timeout=...)" in error[1]
    assert seconds < 20  # the other group's is 30


def test_a_rank_that_dies_ends_the_others(two):
    error, seconds = two[0]["end"]
    assert error[0] == "RankError" and error[1].startswith(
        "Rank 0 of 2 timed out waiting for the other ranks"
    )
    assert seconds < 20


# --- without processes ----------------------------------------------------------------------------


def test_wrong_values_of_distributed():
    net = nn.Linear(4, 3).double()
    with pytest.raises(
        ValueError, match="'always': expected 'auto', True, False, or a process group"
    ):
        ns.summarize(net, loss_fn, draw(1), distributed="always")
    with pytest.raises(ValueError, match="no process group is initialised"):
        ns.summarize(net, loss_fn, draw(1), distributed=True)
