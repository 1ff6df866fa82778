"""What callers set for their own tensors, a default device or dtype, changes no answer of the library."""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import mdmi_fast
from mdmi_fast import (
    Confidence,
    EntropyBound,
    MIBudget,
    MIThreshold,
    PairwiseMIEstimator,
    Probing,
    Random,
    Sequential,
    TopK,
    decode,
    evaluate_estimator,
    label_mi,
    load_estimator,
    load_model,
    mi_map,
    ops,
    reference,
    train_estimator,
)
from mdmi_fast.cache import Cache, CachedMI, CachedPolicy, MemoryStore
from mdmi_fast.decoding.calibrate import Target, accuracy, tune
from mdmi_fast.decoding.policies import (
    AttentionGraph,
    Coloring,
    ConfidenceBudget,
    ConfidenceFactor,
    Memory,
    Schedule,
    Shuffled,
    Stability,
    Step,
)
from mdmi_fast.estimator.splits import adversarial_states, shifted_states
from mdmi_fast.labels import LabelSet, read_labels, write_labels
from mdmi_fast.labels.masking import FixedShare, Trajectory
from mdmi_fast.maps import compare_structure, find_surprises
from mdmi_fast.models.exact import JointTable
from mdmi_fast.tasks.sudoku.boards import rule_matrix
from mdmi_fast.tasks.sudoku.states import decoding_states
from mdmi_fast.watch.audit import audit_position
from mdmi_fast.watch.guard import Guard, pseudo_likelihood


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


def same_under(default: str, run: Callable[[], Any]) -> None:
    """Compares every tensor and number that `run` returns with what it returns without the default."""
    expected, spec = tree_flatten(run())
    with DEFAULTS[default]():
        got, spec_inside = tree_flatten(run())
    assert spec == spec_inside
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, Tensor):
            assert (a.device, a.dtype) == (b.device, b.dtype)
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b or (a != a and b != b)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


K, B, N, V = 3, 2, 5, 7
LOGITS, BASE, WEIGHTS = random(K, B, N, V), random(B, N, V, seed=1), random(K, B, N, seed=2).softmax(0)
U, NETWORK = random(B, N, 6), ([random(6, 4)], [random(4)], random(4), 0.25)
HEAD, ROWS = random(9, 6), torch.tensor([[0, -1], [4, 2]])
ENTROPY, MI, BAND = random(B, N).abs(), random(B, N, N).abs() / 9, random(B, N, 5).abs() / 9
MASK = torch.tensor([[True, True, False, True, True], [True, False, True, True, True]])
CALLS: dict[str, Callable[..., Any]] = {
    "entropy": lambda o: o.entropy(BASE),
    "token_stats": lambda o: tuple(o.token_stats(BASE)),
    "linear_token_stats": lambda o: tuple(o.linear_token_stats(U, HEAD)),
    "kl_divergence": lambda o: o.kl_divergence(LOGITS[0], BASE),
    "expected_entropy": lambda o: o.expected_entropy(LOGITS, WEIGHTS),
    "expected_kl": lambda o: o.expected_kl(LOGITS, WEIGHTS, BASE),
    "mixture_entropy": lambda o: o.mixture_entropy(LOGITS, WEIGHTS),
    "mixture_stats": lambda o: tuple(o.mixture_stats(LOGITS, WEIGHTS, BASE)),
    "mlp": lambda o: o.mlp(U, *NETWORK[:2]),
    "pairwise_mlp": lambda o: o.pairwise_mlp(U, U, *NETWORK, mask=MASK),
    "pairwise_mlp_rows": lambda o: o.pairwise_mlp_rows(U, -U, *NETWORK, ROWS, mask=MASK),
    "pairwise_mlp_band": lambda o: o.pairwise_mlp_band(U, -U, *NETWORK, 6, mask=MASK),
    "color": lambda o: o.color(MI, tau=0.1, mask=MASK),
    "select_threshold": lambda o: tuple(o.select_threshold(ENTROPY, MI, tau=0.1, mask=MASK)),
}
BUDGETS: dict[str, Callable[..., Any]] = {
    "select_budget": lambda o, gamma: tuple(o.select_budget(ENTROPY, MI, gamma=gamma, mask=MASK)),
    "select_budget_band": lambda o, gamma: tuple(o.select_budget_band(ENTROPY, BAND, gamma=gamma, mask=MASK)),
    "score_and_select": lambda o, gamma: tuple(o.score_and_select(ENTROPY, U, -U, *NETWORK, gamma=gamma, mask=MASK)),
}


class OnBackend:
    """`ops`, with a backend named."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __getattr__(self, op: str) -> Any:
        return lambda *args, **options: getattr(ops, op)(*args, **options, backend=self.backend)


EVERY_OP = pytest.mark.op(*CALLS, *BUDGETS)


@EVERY_OP
@pytest.mark.parametrize("default", DEFAULTS)
def test_ops_answer_on_the_device_and_in_the_dtype_of_their_inputs(default: str, backend: str) -> None:
    on = OnBackend(backend)
    for call in CALLS.values():
        same_under(default, lambda call=call: call(on))
    for call in BUDGETS.values():
        for gamma in (1.0, torch.tensor([1.0, 2.0])):
            same_under(default, lambda call=call, gamma=gamma: call(on, gamma))
    prepared = ops.prepare_pairwise(*NETWORK, backend=backend)
    same_under(default, lambda: ops.prepare_pairwise(*NETWORK, backend=backend).network.b_out)
    same_under(default, lambda: ops.pairwise_mlp(U, U, *NETWORK, prepared=prepared))
    same_under(default, lambda: ops.pairwise_mlp(U.double(), U, *NETWORK, precision="bf16"))


@pytest.mark.parametrize("default", DEFAULTS)
def test_the_reference_answers_on_the_device_and_in_the_dtype_of_its_inputs(default: str) -> None:
    budgets = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for call in CALLS.values():
        same_under(default, lambda call=call: call(reference))
    for call in BUDGETS.values():
        same_under(default, lambda call=call: call(reference, budgets))


@pytest.mark.op("entropy_backward", "pairwise_mlp_backward", "pairwise_mlp_rows_backward", "pairwise_mlp_band_backward")
@pytest.mark.parametrize("default", DEFAULTS)
def test_gradients_lie_where_their_tensors_do(default: str, backend: str) -> None:
    on = OnBackend(backend)

    def gradients(name: str) -> tuple[Tensor, ...]:
        tensors = [BASE, LOGITS, U, *NETWORK[0], *NETWORK[1], NETWORK[2]]
        for tensor in tensors:
            tensor.requires_grad_()
        try:
            answer = CALLS[name](on)
            answers = [x for x in (answer if isinstance(answer, tuple) else [answer]) if x.is_floating_point()]
            seeds = [torch.ones_like(x) for x in answers]
            return tuple(g for g in torch.autograd.grad(answers, tensors, seeds, allow_unused=True) if g is not None)
        finally:
            for tensor in tensors:
                tensor.requires_grad_(False)

    for name in CALLS.keys() - {"linear_token_stats", "mixture_stats", "color", "select_threshold"}:
        same_under(default, lambda name=name: gradients(name))


LENGTH = 4
MODEL = JointTable(torch.rand((3,) * LENGTH, generator=torch.Generator().manual_seed(0)) ** 8)
STATES = torch.tensor([[3, 3, 3, 3], [3, 1, 3, 3], [0, 3, 3, 2], [3, 3, 2, 3]])
SEEDS = torch.arange(len(STATES))


def untrained() -> PairwiseMIEstimator:
    torch.manual_seed(0)
    return PairwiseMIEstimator(
        MODEL.hidden_size, layers=(8,), combine="interaction", rank=4, marginals="summary"
    ).eval()


ESTIMATOR = untrained()
LABELS = LabelSet(STATES, STATES == 3, *label_mi(MODEL, STATES)[:2])
POLICIES = [
    Sequential(),
    TopK(2),
    Random(2),
    Confidence(0.6),
    ConfidenceFactor(0.9),
    ConfidenceBudget(Schedule(1.0, 0.5)),
    EntropyBound(torch.tensor([0.5, 1.0, 1.5, 2.0])),
    Stability(0.5, 0.5),
    MIBudget(Probing(), 0.4, entropy_weight=0.0),
    MIBudget(ESTIMATOR, Schedule(2.0, 1.0), order="cheapest"),
    MIBudget(ESTIMATOR, 1.0, mi_min_masked=3, mi_max_masked=3),
    MIThreshold(Shuffled(Probing("kl")), 0.2),
    Coloring(Probing("entropy"), 0.1),
]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_decoding_writes_the_same_tokens(policy: Any, default: str) -> None:
    same_under(default, lambda: tuple(decode(MODEL, STATES, policy, seeds=SEEDS, temperature=0.8)[:2]))
    generator = torch.Generator()
    same_under(
        default,
        lambda: decode(MODEL, STATES, policy, generator=generator.manual_seed(3), block_size=2, top_k=2, top_p=0.9)[0],
    )


@pytest.mark.parametrize("default", DEFAULTS)
def test_attention_caches_guards_and_audits_give_the_same(default: str) -> None:
    output, mask = MODEL(STATES), STATES == 3
    stats = ops.token_stats(output.logits)
    attention = random(len(STATES), LENGTH, LENGTH).softmax(-1)
    step = Step(0, model=MODEL, tokens=STATES, seeds=SEEDS, attention=attention, memory=Memory(), stats=stats)
    same_under(default, lambda: tuple(AttentionGraph(0.3).select(stats, output.hidden, mask, step)))
    same_under(default, lambda: audit_position(ESTIMATOR, output.hidden, mask, step, 0, 2))
    same_under(default, lambda: pseudo_likelihood(MODEL, STATES % 3, mask, positions=2, generator=torch.Generator()))
    budget = MIBudget(Probing(), 0.4, entropy_weight=0.0)

    def twice(make: Callable[[Cache], Any]) -> list[Tensor]:
        policy = make(Cache(MemoryStore()))
        return [decode(MODEL, STATES, policy, seeds=SEEDS).tokens for _ in range(2)]

    same_under(default, lambda: twice(lambda cache: CachedPolicy(budget, MODEL, cache)))
    same_under(default, lambda: twice(lambda cache: MIBudget(CachedMI(Probing(), MODEL, cache), 0.4)))

    def guarded() -> Tensor:
        guard = Guard(budget, audit_share=1.0)
        tokens = decode(MODEL, STATES, guard, seeds=SEEDS).tokens
        guard.finish(SEEDS, quality=[1.0] * len(STATES))
        return tokens

    same_under(default, guarded)
    target = Target(None, 0.5)
    same_under(
        default,
        lambda: [tried[:6] for tried in tune(MODEL, STATES, accuracy(STATES % 3), target, policies=["topk:2"])],
    )


@pytest.mark.parametrize("default", DEFAULTS)
def test_labels_training_and_maps_give_the_same(default: str, tmp_path: Path) -> None:
    for form in ("joint", "entropy", "kl"):
        same_under(default, lambda form=form: tuple(label_mi(MODEL, STATES, form=form)))
    same_under(default, lambda: tuple(label_mi(MODEL, STATES, samples=4, seed=1)))

    def stored() -> tuple[Any, ...]:
        folder = tmp_path / f"labels{len(list(tmp_path.iterdir()))}"
        write_labels(MODEL, [*STATES], folder, forms=("joint",), hidden=True)
        return tuple(read_labels(folder, mask_token_id=3))

    same_under(default, stored)
    same_under(default, lambda: FixedShare(0.5)(MODEL, STATES, [0, 1, 2, 3]))
    same_under(default, lambda: Trajectory()(MODEL, torch.zeros_like(STATES), [0, 1, 2, 3]))
    same_under(default, lambda: shifted_states(MODEL, STATES))
    same_under(default, lambda: adversarial_states(MODEL, STATES))

    def trained() -> tuple[Any, ...]:
        estimator, report = train_estimator(
            copy.deepcopy(ESTIMATOR), MODEL, LABELS, epochs=2, batch_size=2, held_out=0.3, seed=1
        )
        return [p.detach() for p in estimator.parameters()], report.pearson, report.mean_absolute_error

    same_under(default, trained)
    same_under(default, lambda: evaluate_estimator(ESTIMATOR, MODEL, LABELS)[:3])
    ESTIMATOR.save_pretrained(tmp_path / "estimator")
    same_under(default, lambda: [p.detach() for p in load_estimator(tmp_path / "estimator").parameters()])
    found = mi_map(MODEL, STATES[0])
    same_under(default, lambda: (mi_map(MODEL, STATES[0]).mi, mi_map(MODEL, STATES[0]).entropy))
    near = torch.eye(LENGTH).roll(1, 0).bool()
    expected = near | near.T
    same_under(default, lambda: tuple(find_surprises(found, expected)))
    same_under(default, lambda: tuple(compare_structure(found, expected, tau=0.1)))


@pytest.mark.parametrize("default", DEFAULTS)
def test_shipped_networks_are_loaded_as_they_were_saved(default: str) -> None:
    boards = torch.zeros(2, 81, dtype=torch.int64)
    boards[:, 5] = 3
    # the codes of the positions are kept by the first call
    mdmi_fast.tasks.sudoku.model.position_codes.cache_clear()
    with DEFAULTS[default]():
        output = load_model("sudoku")(boards)
        mi = load_estimator("sudoku")(output.hidden, boards == 0)
        sampled = decoding_states(load_model("sudoku"), 2, seed=1)
        rules = rule_matrix()
    expected = load_model("sudoku")(boards)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(mi, load_estimator("sudoku")(expected.hidden, boards == 0))
    assert torch.equal(sampled, decoding_states(load_model("sudoku"), 2, seed=1))
    assert torch.equal(rules, rule_matrix())


OF_DEFAULT_DTYPE = {"empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
FACTORIES = OF_DEFAULT_DTYPE | {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "randint",
        "randperm",
        "scalar_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
    )
}
ROOMS = ("backends", "cache", "decoding", "estimator", "labels", "maps", "ops", "reference", "watch")


def left_to_defaults(path: Path) -> Iterator[str]:
    """Calls that make a tensor without saying where or of what dtype; parameters follow the defaults, as torch's do."""
    tree = ast.parse(path.read_text())
    parameters = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "nn.Parameter"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node in parameters:
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        said = {k.arg for k in node.keywords}
        needed = {"device", "dtype"} if name in OF_DEFAULT_DTYPE else {"device"}
        if module == "torch" and name in FACTORIES and None not in said and not needed <= said:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_no_tensor_is_left_to_the_defaults() -> None:
    root = Path(mdmi_fast.__file__).parent
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    assert len(files) > 50
    # cases for a compiler without a device run on whatever is the default
    assert [call for path in files if path.name != "_cases.py" for call in left_to_defaults(path)] == []
