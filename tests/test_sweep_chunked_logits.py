"""The logits of a language model some rows at a time: the same numbers, in less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns
from newton_summary.derivatives.sweep import chunked_logits, engine

WORDS, LENGTH, TEXTS = 50, 11, 6


class LanguageModel(nn.Module):
    def __init__(self, tied=False, bias=False, cap=None):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS, bias=bias)
        self.cap = cap
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        logits = self.head(self.norm(torch.tanh(self.layer(self.words(tokens)))))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def make_model(**options):
    torch.manual_seed(0)
    return LanguageModel(**options).double()


def tokens():
    return torch.randint(0, WORDS, (TEXTS, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def flattened(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def by_hand(model, batch):
    logits = model(batch[:, :-1])
    logs = torch.log_softmax(logits, dim=2).reshape(-1, WORDS)
    return -logs.gather(1, batch[:, 1:].reshape(-1, 1)).mean()


def with_ignored_words(model, batch):
    targets = batch[:, 1:].masked_fill(batch[:, 1:] < 20, -100)
    return F.cross_entropy(model(batch[:, :-1]).view(-1, WORDS), targets.reshape(-1))


def shifted(model, batch):
    """As transformers' models do: all logits, the last of which are not used."""
    logits = model(batch)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), batch[:, 1:].flatten())


def shifted_twice(model, batch):
    logs = torch.log_softmax(model(batch)[:, :-1][1:, 2:], -1)
    return -logs.gather(2, batch[1:, 3:, None]).mean()


def with_penalty(model, batch):
    return model.head.weight.square().mean() + flattened(model, batch)


def with_curved_weights(model, batch):
    inside = model.norm(torch.tanh(model.layer(model.words(batch[:, :-1]))))
    return by_hand(lambda _: F.linear(inside, torch.tanh(model.words.weight)), batch)


def some_words(model, batch):
    logs = torch.log_softmax(model(batch[:, :-1])[:, :, 3:20], -1)
    return -logs.gather(2, batch[:, 1:, None] % 17).mean()


def words_second(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])


def smoothed(model, batch):
    logits = model(batch[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, batch[:, 1:].flatten(), label_smoothing=0.1)


def with_penalty_on_logits(model, batch):
    logits = model(batch[:, :-1])
    return by_hand(lambda _: logits, batch) + 0.1 * logits.logsumexp(-1).square().mean()


def focal(model, batch):
    logs = torch.log_softmax(model(batch[:, :-1]), -1)
    mine = logs.gather(2, batch[:, 1:, None])
    return -((1 - mine.exp()) ** 2 * mine).mean()


def over_texts(model, batch):
    logs = torch.log_softmax(model(batch[:, :-1]), 0)
    return by_hand(lambda _: logs, batch)


def with_noise(model, batch):
    noise = torch.rand(TEXTS, LENGTH, WORDS, generator=torch.Generator().manual_seed(2)).double()
    return by_hand(lambda batch: model(batch) * noise, batch)


def two_to_the_logits(model, batch):
    return by_hand(lambda batch: torch.pow(2, model(batch)), batch)


def words_in_halves(model, batch):
    logs = model(batch[:, :-1]).unflatten(-1, (2, -1)).log_softmax(-1).flatten(-2)
    return -logs.gather(2, batch[:, 1:, None]).mean()


def one_of_three_places(model, batch):
    scores = F.linear(model(batch[:, :-1]).reshape(-1, 3, WORDS), model.words.weight[:, 0])
    return -scores.log_softmax(-1)[:, 1].mean()


WHOLE = [
    some_words,
    words_second,
    with_penalty_on_logits,
    focal,
    over_texts,
    with_noise,
    two_to_the_logits,
    words_in_halves,
    one_of_three_places,
]


@pytest.fixture
def passes(monkeypatch):
    """Pieces of a few rows each; the logits that were passed."""
    monkeypatch.setattr(chunked_logits, "AT_A_TIME", {"cpu": 2**10})
    monkeypatch.setattr(engine, "SMALL", 0)
    seen = []

    def watched(sweep, found):
        seen.append(found)
        chunked_logits.pass_in_pieces(sweep, found)

    monkeypatch.setattr(engine, "pass_in_pieces", watched)
    return seen


def assert_same(actual, expected):
    for name in ("loss", "gbar", "Hbar", "D3"):
        a, e = getattr(actual, name), getattr(expected, name)
        if e is not None:
            torch.testing.assert_close(a, e, rtol=0, atol=1e-12 * float(e.abs().max()))


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"tied": True}, {"bias": True}, {"cap": 3.0, "bias": True}], ids=str
)
@pytest.mark.parametrize(
    "loss_fn",
    [flattened, shifted, by_hand, with_ignored_words, smoothed, with_penalty],
    ids=lambda f: f.__name__,
)
def test_rows_in_pieces_add_up(passes, options, loss_fn, order):
    model = make_model(**options)
    expected = ns.summarize(model, loss_fn, tokens(), backend="nested", order=order)
    assert not passes
    assert_same(ns.summarize(model, loss_fn, tokens(), backend="sweep", order=order), expected)
    assert [(found.rows, found.at_a_time) for found in passes] == [(TEXTS * LENGTH, 8)]


def test_weights_of_the_logits_have_second_derivatives(passes):
    expected = ns.summarize(make_model(), with_curved_weights, tokens(), backend="nested")
    actual = ns.summarize(make_model(), with_curved_weights, tokens(), backend="sweep")
    assert_same(actual, expected)
    assert passes


@pytest.mark.parametrize("loss_fn", WHOLE, ids=lambda f: f.__name__)
def test_what_needs_the_logits_whole_gets_them(passes, loss_fn):
    model = make_model(bias=True)
    expected = ns.summarize(model, loss_fn, tokens(), backend="nested")
    assert_same(ns.summarize(model, loss_fn, tokens(), backend="sweep"), expected)
    assert not passes


def test_several_heads(passes):
    """One loss for the next word, one for the word after it: no value is all that leads there."""

    def loss_fn(model, batch):
        inside = model.norm(torch.tanh(model.layer(model.words(batch[:, :-2]))))
        first, second = model.head(inside), model.second(inside)
        loss = F.cross_entropy(first.flatten(0, 1), batch[:, 1:-1].flatten())
        return loss + F.cross_entropy(second.flatten(0, 1), batch[:, 2:].flatten())

    model = make_model(bias=True)
    model.second = nn.Linear(8, WORDS).double()
    expected = ns.summarize(model, loss_fn, tokens(), backend="nested")
    assert_same(ns.summarize(model, loss_fn, tokens(), backend="sweep"), expected)
    assert len(passes) == 2


def test_slopes_of_zero_stay_zero(passes):
    """The bias of the keys shifts all scores by the same: rounding would make a slope of it."""

    class Attention(LanguageModel):
        def forward(self, tokens):
            x = self.words(tokens)
            attended = F.scaled_dot_product_attention(x, self.layer(x), x)
            return self.head(self.norm(attended))

    model = Attention(bias=True)
    summary = ns.summarize(model, with_penalty, tokens(), backend="sweep")
    assert passes
    s = summary.partition.names.index("layer.bias")
    assert float(summary.gbar[s]) == float(summary.D3[s]) == 0
    assert not summary.Hbar[s].any()


def test_what_goes_into_the_logits_is_used_once_more_before_they_are(passes):
    def loss_fn(model, batch):
        inside = []
        hook = model.norm.register_forward_hook(lambda _, args, out: inside.append(out))
        logits = model(batch[:, :-1])
        hook.remove()
        penalty = inside[0].square().mean()
        penalty = penalty + torch.log_softmax(penalty, 0)  # of one number: always 0
        penalty = penalty - torch.log_softmax(model.prior, 0)[0]  # of no layer
        spectrum = torch.fft.fft(model.head.bias).abs().square().mean()  # complex: there is no cut
        return by_hand(lambda _: logits, batch) + penalty + spectrum

    model = make_model(bias=True)
    model.prior = nn.Parameter(torch.linspace(0, 1, WORDS, dtype=torch.float64))
    expected = ns.summarize(model, loss_fn, tokens(), backend="nested")
    assert_same(ns.summarize(model, loss_fn, tokens(), backend="sweep"), expected)
    assert passes


def test_tokens_left_out_twice(passes):
    model = make_model(bias=True)
    expected = ns.summarize(model, shifted_twice, tokens(), backend="nested")
    assert_same(ns.summarize(model, shifted_twice, tokens(), backend="sweep"), expected)
    assert [found.rows for found in passes] == [(TEXTS - 1) * (LENGTH - 2)]


def test_with_groups_in_chunks(passes):
    model = make_model(bias=True)
    expected = ns.summarize(model, flattened, tokens()[:1], backend="nested")
    actual = ns.summarize(
        model, flattened, tokens()[:1], backend="sweep", stack_limit=2**13, microbatch=None
    )
    assert len(passes) > 1
    assert_same(actual, expected)


def test_parts_of_tensors_as_groups(passes):
    model = make_model(bias=True)
    params = dict(model.named_parameters())
    labels = {name: torch.arange(p.numel()).reshape(p.shape) % 3 for name, p in params.items()}
    partition = ns.Partition(["a", "b", "c"], params, labels)
    how = {"partition": partition}
    expected = ns.summarize(model, flattened, tokens(), backend="nested", **how)
    assert_same(ns.summarize(model, flattened, tokens(), backend="sweep", **how), expected)
    assert passes


def test_only_the_head_moves(passes):
    model = make_model(bias=True)
    for parameter in (
        *model.words.parameters(),
        *model.layer.parameters(),
        *model.norm.parameters(),
    ):
        parameter.requires_grad_(False)
    expected = ns.summarize(model, flattened, tokens(), backend="nested")
    assert_same(ns.summarize(model, flattened, tokens(), backend="sweep"), expected)
    assert passes


def test_lower_precision_on_the_way(passes):
    model = make_model(bias=True).float()

    def half(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    in_pieces = ns.summarize(model, half, tokens(), backend="sweep")
    assert passes
    chunked_logits.AT_A_TIME["cpu"] = 2**30
    whole = ns.summarize(model, half, tokens(), backend="sweep")
    assert len(passes) == 1
    for name in ("gbar", "Hbar", "D3"):
        a, e = getattr(in_pieces, name), getattr(whole, name)
        torch.testing.assert_close(a, e, rtol=0, atol=1e-5 * float(e.abs().max()))


def test_small_stacks_are_passed_at_once():
    """The network of a classification has few logits: nothing is cut there."""
    model = make_model()
    seen = []

    def watched(*args):
        seen.append(chunked_logits.find_chunked_logits(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "SMALL", 0)
        patch.setattr(engine, "find_chunked_logits", watched)
        ns.summarize(model, flattened, tokens(), backend="sweep")
    assert seen == [[]]


def test_less_memory_is_asked_for(passes):
    """Samples stay together where the rest of the network fits into the limit."""
    model = make_model(bias=True)
    sizes = []

    def loss_fn(model, batch):
        sizes.append(len(batch))
        return flattened(model, batch)

    for at_a_time in (2**10, 2**30):  # by themselves, or because of the limit
        chunked_logits.AT_A_TIME["cpu"] = at_a_time
        ns.summarize(model, loss_fn, tokens(), backend="sweep", stack_limit=2**18)
    assert set(sizes) == {TEXTS}
    assert len(passes) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "find_chunked_logits", lambda *args: [])
        ns.summarize(model, loss_fn, tokens(), backend="sweep", stack_limit=2**18)
    assert min(sizes) < TEXTS
