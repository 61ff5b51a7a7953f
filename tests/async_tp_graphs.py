"""Programs with collectives beside products, for the tests of AsyncTP, and what it makes of the graph of each."""

import torch
import torch.nn.functional as F
from torch.distributed import _functional_collectives as functional


def gathered(x, dim, group):
    return functional.all_gather_tensor(x, dim, group)


def waited(x, dim, group, uses):
    """Several wholes of one gather, each of which waits for it, as those of torch 2.14 do."""
    op, ranks = torch.ops._c10d_functional, group.size()
    brought = op.all_gather_into_tensor(x, ranks, group.group_name)
    wholes = [op.wait_tensor(brought) for _ in uses]
    return [use(torch.cat(whole.chunk(ranks), dim) if dim else whole) for use, whole in zip(uses, wholes, strict=True)]


def waited_scatter(x, w, group):
    op = torch.ops._c10d_functional
    brought = op.reduce_scatter_tensor(x @ w.T, "sum", group.size(), group.group_name)
    return [op.wait_tensor(brought) + 1, op.wait_tensor(brought) * 2]


def scattered(x, dim, group, operation="sum"):
    return functional.reduce_scatter_tensor(x, operation, dim, group)


def sliced(x, dim, ranks, group):
    """A gather along dim as torch writes it where it has to know no sizes."""
    whole, part = functional.all_gather_tensor(x, 0, group), x.shape[0]
    return torch.cat([whole[i * part : (i + 1) * part] for i in range(ranks)], dim)


def written(x, w, group):
    """Products of what is written to in place between them and their collectives, or after."""
    y, t, z = gathered(x, 0, group), w.T, x @ w.T
    rows = y.view(-1, K)
    for given in (x, w, y):
        given.mul_(2)
    return [rows @ w.T, y @ t, scattered(z, 0, group)]


def written_gathered(x, w, group):
    """A product of a view of what is gathered, which is written to in between."""
    y = gathered(x, 0, group)
    rows, t = y.view(-1, K), w.T
    y.mul_(2)
    return rows @ t


def written_between(x, w, v, group):
    """Products of one collective, with what the second of them takes written to behind the first."""
    y, t = gathered(x, 0, group), v.T
    first = y @ w.T
    v.mul_(2)
    z, t = [first, y @ t], w.T
    one = x @ t
    x.mul_(2)
    return [*z, scattered(one + x @ t, 0, group)]


def of_two(x, group):
    """Chunks of two gathers, as if they were of one."""
    whole, other, part = gathered(x, 0, group), gathered(x + 1, 0, group), x.shape[0]
    return torch.cat([(other if i else whole)[i * part : (i + 1) * part] for i in range(group.size())], 1)


def chunk_elsewhere(x, u, group):
    """A scatter along dimension 1 of a product, one chunk of which is used by itself."""
    parts = F.linear(x, u).chunk(group.size(), 1)
    return [functional.reduce_scatter_tensor(torch.cat(parts), "sum", 0, group), parts[0] + 1]


def cast_and_chunk(x, w, group):
    """A product of the whole, cast, and a use of the first rank's part as it is."""
    parts = gathered(x.bfloat16(), 0, group).chunk(group.size())
    return [F.linear(torch.cat(parts, 1).float(), w), parts[0] + 1]


def halves(x, group, *biases):
    """Products of 2049, which float16 does not have: 2050 with a bias of 1, unless they are rounded before it."""
    y = gathered(torch.ones_like(x).half(), 0, group)
    return [F.linear(y, y.new_full((N, K), 341.5), b) for b in biases]


def both(x, w, b, group):
    """The gathered along dimension 0, itself, its chunks and the whole along 1."""
    whole = functional.all_gather_tensor(x, 0, group)
    first, *more = whole.chunk(group.size())
    return [whole * 2, first + 1, F.linear(torch.cat([first, *more], 1), w, b)]


def turned(x, group, pad=0):
    """A gather along dimension 1, of which the ranks' parts are in another order, or of which rows are left out."""
    whole, part = functional.all_gather_tensor(x, 0, group), x.shape[0]
    return torch.cat([whole[i * part : (i + 1) * part - pad] for i in range(group.size())][:: 1 if pad else -1], 0 if pad else 1)


def cast(x, w, group):
    with torch.autocast(x.device.type, torch.bfloat16):
        return [F.linear(gathered(x, 0, group), w), scattered(F.linear(x, w), 0, group)]


ROWS, K, N = 8, 6, 12
#: name: (shape of x, function of x, weights w [N, K], v [N, K], u [K, N], bias b [N] and group; collectives, replaced; why not).
GRAPHS = {
    "rows": ((4, K), lambda x, w, v, u, b, g: gathered(x, 0, g) @ w.T, 1, 1, ""),
    "batch": ((3, 4, K), lambda x, w, v, u, b, g: F.linear(gathered(x, 1, g), w, b), 1, 1, ""),
    "middle": ((2, 3, 4, K), lambda x, w, v, u, b, g: F.linear(gathered(x, 2, g), w), 1, 1, ""),
    "one of a batch": ((1, 4, K), lambda x, w, v, u, b, g: F.linear(gathered(x, 1, g), w), 1, 1, ""),
    "first of three": ((3, 4, K), lambda x, w, v, u, b, g: F.linear(gathered(x, 0, g), w, b).relu(), 1, 1, ""),
    "no features": ((3, 4, K), lambda x, w, v, u, b, g: F.linear(gathered(x[..., :0], 1, g), w[:, :0], b), 1, 1, ""),
    "no columns": ((3, 4, K), lambda x, w, v, u, b, g: F.linear(gathered(x, 1, g), w[:0], b[:0]), 1, 1, ""),
    "slices": ((3, 4, K), lambda x, w, v, u, b, g: F.linear(sliced(x, 1, g.size(), g), w), 1, 1, ""),
    "several, some with a bias, and the gathered": (
        (3, 4, K), lambda x, w, v, u, b, g: [F.linear(y := gathered(x, 1, g), w, b), F.linear(y, v), y.T], 1, 1, ""),
    "waits": ((3, 4, K), lambda x, w, v, u, b, g: waited(
        x, 1, g, [lambda y: F.linear(y, w, b), lambda y: F.linear(y, v), lambda y: y * 2]), 1, 1, ""),
    "waits of rows": ((3, 4, K), lambda x, w, v, u, b, g: waited(
        x, 0, g, [lambda y: F.linear(y, w, b), lambda y: y.view(-1, K) @ v.T, lambda y: y + 1]), 1, 1, ""),
    "a whole": ((3, 4, K), lambda x, w, v, u, b, g: waited(x, 1, g, [lambda y: F.linear(y, w), lambda y: y]), 1, 1, ""),
    "wholes apart": (
        (3, 4, K), lambda x, w, v, u, b, g: waited(x, 1, g, [lambda y: F.linear(y, w), lambda y: y, lambda y: y.mT]),
        1, 0, "made whole several times"),
    "wholes written to": (
        (3, 4, K), lambda x, w, v, u, b, g: waited(x, 1, g, [lambda y: y.view(-1, K).mul_(2), lambda y: F.linear(y, w) + 0]),
        1, 0, "made whole several times"),
    "waits of a scatter": ((4, K), lambda x, w, v, u, b, g: waited_scatter(x, w, g), 1, 1, ""),
    "cast": ((4, K), lambda x, w, v, u, b, g: gathered(x.double(), 0, g).float() @ w.T, 1, 1, ""),
    "cast to more": ((4, K), lambda x, w, v, u, b, g: gathered(x.half(), 0, g).float() @ w.T, 1, 1, ""),
    "autocast": ((ROWS, K), lambda x, w, v, u, b, g: cast(x, w, g), 2, 2, ""),
    "a weight and a bias with gaps": (
        (4, K), lambda x, w, v, u, b, g: F.linear(gathered(x, 0, g), torch.cat([w, v], 1)[::2, ::2], b[::2]), 1, 1, ""),
    "features": ((4, K // 2), lambda x, w, v, u, b, g: gathered(x, 1, g) @ torch.cat([x.T] * g.size()), 1, 0, "features"),
    "a bias is added before the sum is rounded": (
        (4, K), lambda x, w, v, u, b, g: halves(x, g, torch.ones_like(b).half(), None), 1, 1, ""),
    "a product that is scaled": (
        (4, K), lambda x, w, v, u, b, g: torch.addmm(b, gathered(x, 0, g), w.T, beta=2, alpha=3), 1, 0, "is scaled"),
    "one bias for all columns": (
        (4, K), lambda x, w, v, u, b, g: torch.addmm(b[:1], gathered(x, 0, g), w.T), 1, 0, "is scaled"),
    "cast, and a chunk elsewhere": ((3, 4, K), lambda x, w, v, u, b, g: cast_and_chunk(x, w, g), 1, 0, "no product takes"),
    "written to behind a view": ((4, K), lambda x, w, v, u, b, g: written_gathered(x, w, g), 1, 0, "in place"),
    "itself, chunks and the whole": ((3, 4, K), lambda x, w, v, u, b, g: both(x, w, b, g), 1, 1, ""),
    "twice": ((4, K), lambda x, w, v, u, b, g: [gathered(x, 0, g) @ w.T, gathered(x, 0, g) @ v.T], 2, 2, ""),
    "turned": ((3, 4, K), lambda x, w, v, u, b, g: F.linear(turned(x, g), w), 1, 0, "no product takes"),
    "padded": ((3, 4, K), lambda x, w, v, u, b, g: F.linear(turned(x, g, pad=1), w), 1, 0, "no product takes"),
    "transposed": ((4, K), lambda x, w, v, u, b, g: (y := gathered(x, 0, g)).T @ y[:, :1].relu(), 1, 0, "no product takes"),
    "the right side": (
        (4, K), lambda x, w, v, u, b, g: torch.cat([x.T] * g.size(), 1) @ gathered(x, 0, g), 1, 0, "no product takes"),
    "written to in place": ((4, K), lambda x, w, v, u, b, g: written(x, w, g), 2, 0, "in place"),
    "of itself": ((4, K), lambda x, w, v, u, b, g: (y := gathered(x, 0, g)) @ y.T, 1, 0, "comes from what is gathered"),
    "of doubles": ((4, K), lambda x, w, v, u, b, g: gathered(x.double(), 0, g) @ w.T.double(), 1, 0, "torch.float64"),
    "no product": ((4, K), lambda x, w, v, u, b, g: gathered(x, 0, g).relu() @ w.T, 1, 0, "no product takes"),
    "a weight after another gather": (
        (4, K), lambda x, w, v, u, b, g: gathered(x, 0, g) @ gathered(x.relu(), 0, g).T, 2, 0, "cannot come before the gather"),
    "a bias of the second only": (
        (3, 4, K), lambda x, w, v, u, b, g: [F.linear(y := gathered(x, 1, g), v), F.linear(y, w, b)], 1, 1, ""),
    "dimensions from the end": (
        (3, 4, K), lambda x, w, v, u, b, g: F.linear(torch.cat(gathered(x, 0, g).split(3, -3), -2), w), 1, 1, ""),
    "slices from the end": (
        (3, 4, K),
        lambda x, w, v, u, b, g: F.linear(
            torch.cat([y.narrow(-3, i, 3) for y in [gathered(x, 0, g)] for i in range(0, len(y), 3)], -2), w),
        1, 1, ""),
    "a weight that is no transpose": ((4, K), lambda x, w, v, u, b, g: gathered(x, 0, g) @ u.permute(0, 1), 1, 1, ""),
    "a weight that the graph holds": (
        (4, K), lambda x, w, v, u, b, g: gathered(x, 0, g) @ torch.tensor([[1.0, 2.0]] * K, device=x.device), 1, 1, ""),
    "another length of rows": (
        (4, K), lambda x, w, v, u, b, g: gathered(x, 0, g).view(-1, K // 2) @ w.T[: K // 2], 1, 0, "no product takes"),
    "the first rows only": (
        (3, 4, K),
        lambda x, w, v, u, b, g: F.linear(torch.cat(gathered(x, 0, g)[: g.size()].split(1), 1), w), 1, 0, "is cut behind"),
    "of two gathers": ((3, 4, K), lambda x, w, v, u, b, g: F.linear(of_two(x, g), w), 2, 0, "no product takes"),
    "chunks along another dimension": (
        (3, 4, K), lambda x, w, v, u, b, g: F.linear(torch.cat(gathered(x, 0, g).chunk(g.size(), 1)), w), 1, 0, "no product takes"),
    "cast, and itself": (
        (4, K), lambda x, w, v, u, b, g: [(y := gathered(x.bfloat16(), 0, g)).float() @ w.T, y + 1], 1, 0, "no product takes"),
    "a bias that is gathered": (
        (4, K), lambda x, w, v, u, b, g: F.linear(x, u.T[:4], gathered(b[: 4 // g.size()], 0, g)), 1, 0, "no product takes"),
    "a bias for each number": (
        (N, K), lambda x, w, v, u, b, g: torch.addmm(b.outer(b), gathered(x[: N // g.size()], 0, g), w.T), 1, 0, "is scaled"),
    "written to between products": (
        (ROWS, K), lambda x, w, v, u, b, g: written_between(x, w, v, g), 2, 0, "in place"),
    "chunks side by side": (
        (ROWS, N), lambda x, w, v, u, b, g: scattered(torch.cat((x @ w).chunk(2), 1), 0, g), 1, 0, "neither a product"),
    "a chunk used elsewhere": ((3, ROWS, N), lambda x, w, v, u, b, g: chunk_elsewhere(x, u, g), 1, 0, "used elsewhere"),
    "rows that are cut off": (
        (3, 4, K), lambda x, w, v, u, b, g: F.linear(torch.cat(gathered(x, 0, g).split(3), 1)[:, :-1], w), 1, 0, "is cut behind"),
    "rows that are added": (
        (ROWS - 1, N),
        lambda x, w, v, u, b, g: scattered(torch.cat([(y := x @ w)[:4], F.pad(y[4:], (0, 0, 0, 1))]), 0, g), 1, 0, "is padded"),
    "twice the same": ((ROWS, N), lambda x, w, v, u, b, g: scattered((y := x @ w) + y, 0, g), 1, 0, "adds one product to itself"),
    "one of several results": (
        (ROWS, N), lambda x, w, v, u, b, g: scattered(torch.cat([x.topk(4, 0)[0]] * g.size()), 0, g), 1, 0, "neither a product"),
    "sum": ((ROWS, N), lambda x, w, v, u, b, g: scattered(x @ w, 0, g), 1, 1, ""),
    "mean": ((ROWS, N), lambda x, w, v, u, b, g: scattered(x @ w, 0, g, "avg"), 1, 1, ""),
    "a batch scattered": ((3, ROWS, N), lambda x, w, v, u, b, g: scattered(F.linear(x, u), 1, g), 1, 1, ""),
    "no features scattered": ((3, ROWS, K), lambda x, w, v, u, b, g: scattered(F.linear(x[..., :0], w[:, :0]), 1, g), 1, 1, ""),
    "no columns scattered": ((3, ROWS, K), lambda x, w, v, u, b, g: scattered(F.linear(x, w[:0], b[:0]), 1, g), 1, 1, ""),
    "its bias": ((3, ROWS, K), lambda x, w, v, u, b, g: scattered(F.linear(x, w, b / g.size()), 1, g), 1, 1, ""),
    "a sum of products": ((3, ROWS, K), lambda x, w, v, u, b, g: scattered(F.linear(x, w) + F.linear(x + 1, v), 1, g), 1, 1, ""),
    "a sum that is scaled": (
        (ROWS, N), lambda x, w, v, u, b, g: scattered(torch.add(x @ w, (x + 1) @ w, alpha=2), 0, g), 1, 0, "neither a product"),
    "a product that is scaled, scattered": (
        (ROWS, N), lambda x, w, v, u, b, g: scattered(torch.addmm(b[:K], x, w, alpha=2), 0, g), 1, 0, "is scaled"),
    "a sum of a product and a row": (
        (ROWS, N), lambda x, w, v, u, b, g: scattered(x @ w + x[:1] @ w, 0, g), 1, 0, "neither a product"),
    "a sum in two dtypes": (
        (ROWS, N), lambda x, w, v, u, b, g: scattered(x @ w + x.half() @ w.half(), 0, g), 1, 0, "['torch.float16', 'torch.f"),
    "cast before": ((ROWS, N), lambda x, w, v, u, b, g: scattered((x @ w).half(), 0, g), 1, 0, "in another dtype"),
    "cast to more before": (
        (ROWS, N), lambda x, w, v, u, b, g: scattered((x.half() @ w.half()).float(), 0, g), 1, 0, "in another dtype"),
    "columns": ((N, ROWS), lambda x, w, v, u, b, g: scattered(x.T @ w, 0, g), 1, 1, ""),
    "a bias of each": ((3, ROWS, K), lambda x, w, v, u, b, g: scattered(F.linear(x, w, b), 1, g), 1, 1, ""),
    "several biases, some alike": (
        (ROWS, K),
        lambda x, w, v, u, b, g: scattered(F.linear(x, w, b[::2].repeat(2)) + F.linear(x, v) + F.linear(x, v, b), 0, g, "avg"),
        1, 1, ""),
    "the mean of halves": (
        (ROWS, N), lambda x, w, v, u, b, g: scattered(x.half() @ w.half(), 0, g, "avg"), 1, 0, "float16"),
    "features scattered": ((ROWS, K), lambda x, w, v, u, b, g: scattered(x @ w.T, 1, g), 1, 0, "scatters the features"),
    "used twice": ((ROWS, N), lambda x, w, v, u, b, g: [scattered(y := x @ w, 0, g), y + 1], 1, 0, "used elsewhere"),
    "not a product": ((ROWS, N), lambda x, w, v, u, b, g: scattered((x @ w).relu(), 0, g), 1, 0, "neither a product"),
    "the largest": ((ROWS, N), lambda x, w, v, u, b, g: scattered(x @ w, 0, g, "max"), 1, 0, "reduces by 'max'"),
    "there and back": (
        (4, K), lambda x, w, v, u, b, g: scattered(F.gelu(gathered(x, 0, g) @ w.T) @ u.T, 0, g), 2, 2, ""),
}  # fmt: skip
