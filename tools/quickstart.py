"""Trains a small Gated DeltaNet on text of this machine, then checks the operator: `bash tools/quickstart.sh` runs it.

Three parts, each with a bound; exit status 1 when one is missed:
1. training: a character model with two Gated DeltaNet layers; the loss must fall;
2. state: a prompt fed in pieces, with the recurrent state and the convolutions' last inputs carried over, must give the
   outputs of one call;
3. accuracy: the operator on the trained model's own activations against the float64 token recurrence, per head.
"""

import argparse
import os
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # an installed flash_qla comes first
# Threads that spin while they wait make small operations ten times slower on a machine that is busy with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from tqdm import tqdm

    import flash_qla
    from flash_qla import env as flash_qla_env
    from flash_qla.ops.gated_delta_rule.chunk.reference import recurrence
    from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
    from flash_qla.utils import l2norm
except ImportError as error:
    sys.exit(
        f"cannot import what the quickstart needs: {error}\n"
        "Run `bash tools/quickstart.sh`, which installs it, or `pip install -e .` in the checkout first."
    )

VOCABULARY = 128  # ASCII; anything else becomes a question mark
# The loss must fall by this many nats per character: mean of the first 5 steps minus mean of the last 5.
LOSS_FALL_NATS = 1.0
LOSS_FALL_STEPS = 60
LOSS_FALL_FEWER_STEPS_NATS = 0.1
# Largest relative L2 error. bfloat16 rounds inputs of matrix products and results to 2^-9.
PIECES_BOUND = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
ERROR_BOUND = {torch.float32: 3e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the training run."""

    width: int
    num_k_heads: int
    num_v_heads: int
    head_dim: int
    batch: int
    num_tokens: int
    steps: int
    dtype: torch.dtype
    num_layers: int = 2
    conv_size: int = 4
    learning_rate: float = 4e-3


# A CPU has no use for bfloat16; the kernels are built for heads of 128.
CPU = Config(
    width=128, num_k_heads=2, num_v_heads=4, head_dim=32, batch=8, num_tokens=256, steps=100, dtype=torch.float32
)
GPU = Config(
    width=512, num_k_heads=4, num_v_heads=8, head_dim=128, batch=16, num_tokens=1024, steps=200, dtype=torch.bfloat16,
    learning_rate=2e-3,
)  # fmt: skip


def load_text(limit: int = 2_000_000) -> torch.Tensor:
    """Returns character codes of this repository's documents and of the Python standard library's sources."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("flash_qla/**/*.md")) + sorted(library.glob("*.py"))
    text, size = [], 0
    for file in files:
        text.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(text[-1])
        if size > limit:
            break
    if size < 100_000:
        sys.exit(
            f"found only {size} characters of text in {ROOT} and {library}: is the standard library's source there?"
        )
    ascii_text = "\n\n".join(text)[:limit].encode("ascii", "replace")
    return torch.frombuffer(bytearray(ascii_text), dtype=torch.uint8).long()


def causal_convolution(x, weight, last_inputs):
    """Depthwise causal convolution over time. Returns its output and the inputs that the next piece needs.

    Args:
        x: `[B, T, channels]`.
        weight: `[channels, 1, conv_size]`.
        last_inputs: `[B, conv_size - 1, channels]` before x, or None at the start of a text.
    """
    keep = weight.shape[-1] - 1
    if last_inputs is None:
        last_inputs = x.new_zeros(x.shape[0], keep, x.shape[2])
    x = torch.cat([last_inputs, x], dim=1)
    y = F.conv1d(x.transpose(1, 2), weight, groups=weight.shape[0]).transpose(1, 2)
    return y, x[:, x.shape[1] - keep :]


class GatedDeltaNet(nn.Module):
    """One mixing layer: short convolution, gated delta rule, output gate."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.num_k_heads, config.num_v_heads, config.head_dim
        key_width, value_width = config.num_k_heads * config.head_dim, config.num_v_heads * config.head_dim
        self.sizes = [key_width, key_width, value_width]
        self.qkv = nn.Linear(config.width, sum(self.sizes), bias=False)
        self.conv = nn.Parameter(torch.randn(sum(self.sizes), 1, config.conv_size) * config.conv_size**-0.5)
        self.gates = nn.Linear(config.width, 2 * config.num_v_heads, bias=False)
        # As in Mamba-2: decay rates from 1 to 16, time steps from 0.001 to 0.1.
        self.A_log = nn.Parameter(torch.empty(config.num_v_heads).uniform_(1, 16).log())
        step = torch.exp(torch.empty(config.num_v_heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.output_gate = nn.Linear(config.width, value_width, bias=False)
        self.norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.output = nn.Linear(value_width, config.width, bias=False)

    def operands(self, x, last_inputs):
        """Returns q, k, v, the logits of gate and beta, and the inputs that the next piece's convolution needs."""
        num_k_heads, num_v_heads, head_dim = self.heads
        qkv, last_inputs = causal_convolution(self.qkv(x), self.conv.to(x.dtype), last_inputs)
        q, k, v = F.silu(qkv).split(self.sizes, dim=-1)
        q, k = (t.unflatten(-1, (num_k_heads, head_dim)) for t in (q, k))
        v = v.unflatten(-1, (num_v_heads, head_dim))
        gate_logits, beta_logits = self.gates(x).chunk(2, dim=-1)
        return q, k, v, gate_logits, beta_logits, last_inputs

    def forward(self, x, cache=None):
        """Maps `[B, T, width]` to the same shape. Returns the output and the cache for the text's next piece."""
        last_inputs, state = cache or (None, None)
        q, k, v, gate_logits, beta_logits, last_inputs = self.operands(x, last_inputs)
        o, state = flash_qla.chunk_gated_delta_rule(
            q,
            k,
            v,
            gate_logits,
            torch.sigmoid(beta_logits.float()),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        o = self.norm(o.float()) * F.silu(self.output_gate(x).view_as(o))
        return self.output(o.flatten(-2)), (last_inputs, state)


class Block(nn.Module):
    """Mixing layer and MLP, each behind an RMSNorm and around a residual."""

    def __init__(self, config: Config):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mixer = GatedDeltaNet(config)
        self.mlp = nn.Sequential(
            nn.RMSNorm(config.width, eps=1e-6),
            nn.Linear(config.width, 3 * config.width, bias=False),
            nn.SiLU(),
            nn.Linear(3 * config.width, config.width, bias=False),
        )

    def forward(self, x, cache=None):
        mixed, cache = self.mixer(self.mixer_norm(x), cache)
        x = x + mixed
        return x + self.mlp(x), cache


class CharacterModel(nn.Module):
    """Predicts the next character."""

    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = nn.Sequential(nn.RMSNorm(config.width, eps=1e-6), nn.Linear(config.width, VOCABULARY, bias=False))

    def forward(self, codes, caches=None):
        """Maps codes `[B, T]` to logits `[B, T, VOCABULARY]`. Returns them and the caches for the text's next piece."""
        x = self.embedding(codes)
        new_caches = []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x, cache = block(x, cache)
            new_caches.append(cache)
        return self.head(x), new_caches


def train(model: CharacterModel, config: Config, codes: torch.Tensor, device: torch.device) -> list[float]:
    """Trains with AdamW. Returns the loss of each step, in nats per character."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, min(10, config.steps // 4))

    def rate(step):
        return min((step + 1) / warmup, max(0.1, 1 - step / config.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, seconds = [], 0.0
    with tqdm(total=config.steps, desc="training", unit="step", dynamic_ncols=True) as progress:
        for step in range(config.steps):
            starts = torch.randint(len(codes) - config.num_tokens - 1, (config.batch,))
            window = torch.stack([codes[s : s + config.num_tokens + 1] for s in starts]).to(device)
            began = time.perf_counter()
            with torch.autocast(device.type, dtype=config.dtype, enabled=config.dtype != torch.float32):
                logits, _ = model(window[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            # The first step may compile kernels.
            seconds += time.perf_counter() - began if step else 0.0
            speed = step * config.batch * config.num_tokens / max(seconds, 1e-9)
            progress.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
            progress.update()
    return losses


@torch.no_grad()
def logits_in_pieces(model: CharacterModel, codes: torch.Tensor, lengths: list[int], config: Config) -> torch.Tensor:
    """Feeds `[B, T]` codes piece by piece with carried caches. Returns the logits of all of them, float32."""
    logits, caches = [], None
    for piece in codes.split(lengths, dim=1):
        with torch.autocast(codes.device.type, dtype=config.dtype, enabled=config.dtype != torch.float32):
            out, caches = model(piece, caches)
        logits.append(out.float())
    return torch.cat(logits, dim=1)


@torch.no_grad()
def continue_text(model: CharacterModel, prompt: str, length: int, config: Config, device: torch.device) -> str:
    """Samples `length` characters after the prompt, one call a character."""
    codes, caches, text = torch.tensor([list(prompt.encode("ascii"))], device=device), None, prompt
    for _ in range(length):
        with torch.autocast(device.type, dtype=config.dtype, enabled=config.dtype != torch.float32):
            logits, caches = model(codes, caches)
        codes = torch.multinomial((logits[:, -1].float() / 0.7).softmax(-1), 1)
        text += chr(codes.item())
    return text


def _errors_per_head(value: torch.Tensor, exact: torch.Tensor, head_dim: int) -> list[float]:
    difference, exact = (x.double().movedim(head_dim, 0).flatten(1) for x in (value - exact, exact))
    return (difference.norm(dim=1) / exact.norm(dim=1)).tolist()


@torch.no_grad()
def operator_errors(model: CharacterModel, codes: torch.Tensor, config: Config) -> dict[str, list[float]]:
    """Runs the first layer's operator on real activations. Returns errors against float64 per value head."""
    block = model.blocks[0]
    with torch.autocast(codes.device.type, dtype=config.dtype, enabled=config.dtype != torch.float32):
        x = block.mixer_norm(model.embedding(codes))
        q, k, v, gate_logits, beta_logits, _ = block.mixer.operands(x, None)
    q, k, v = (t.to(config.dtype) for t in (q, k, v))
    beta = torch.sigmoid(beta_logits.float())
    A_log, dt_bias = block.mixer.A_log, block.mixer.dt_bias
    state = torch.randn(codes.shape[0], config.num_v_heads, config.head_dim, config.head_dim, device=codes.device)
    o, final_state = flash_qla.chunk_gated_delta_rule(
        q, k, v, gate_logits, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    g = -A_log.double().exp() * F.softplus(gate_logits.double() + dt_bias.double())
    seqs = Sequences.build(*codes.shape, 64)
    exact_o, exact_state = recurrence(
        l2norm(q.double()), l2norm(k.double()), v.double(), g, beta, config.head_dim**-0.5, state, seqs
    )
    return {"o": _errors_per_head(o, exact_o, 2), "final state": _errors_per_head(final_state, exact_state, 1)}


def check(name: str, value: float, bound: float, at_least: bool = False) -> bool:
    """Prints one verdict. Returns whether the bound is kept (NaN keeps none)."""
    passed = value >= bound if at_least else value <= bound
    relation = "at least" if at_least else "at most"
    print(f"    {'ok' if passed else 'FAILED':<7} {name}: {value:.3g} ({relation} {bound:g})")
    return passed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help=f"training steps, at least 10 (CPU {CPU.steps}, GPU {GPU.steps})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", choices=("auto", "reference", "kernels"), help="sets FLASH_QLA_BACKEND")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 10:
        parser.error("--steps must be at least 10: the loss is compared between the first and the last 5 steps")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.backend:
        os.environ["FLASH_QLA_BACKEND"] = arguments.backend
    name = arguments.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"--device cuda: torch {torch.__version__} sees no CUDA device. Check nvidia-smi and torch's CUDA build."
        )
    if name == "cpu" and flash_qla_env.backend() == "kernels":
        sys.exit("The kernels need a CUDA device: leave --backend and FLASH_QLA_BACKEND at auto, or use --device cuda.")
    device = torch.device(name)
    config = GPU if name == "cuda" else CPU
    if arguments.steps:
        config = Config(**{**vars(config), "steps": arguments.steps})
    torch.manual_seed(arguments.seed)

    codes = load_text()
    model = CharacterModel(config).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"==> training {size:,} parameters on {len(codes):,} characters, {device}, {config.dtype}")
    began = time.perf_counter()
    losses = train(model, config, codes, device)
    seconds = time.perf_counter() - began
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    rate = config.steps * config.batch * config.num_tokens / seconds
    print(f"    loss {first:.3f} -> {last:.3f} nats per character in {seconds:.1f} s, {rate:,.0f} tokens/s overall")
    needed = LOSS_FALL_NATS if config.steps >= LOSS_FALL_STEPS else LOSS_FALL_FEWER_STEPS_NATS
    passed = [check("fall of the loss", first - last, needed, at_least=True)]

    print("==> the trained model goes on by itself, one character a call")
    sample = continue_text(model.eval(), "def ", 120, config, device)
    print("\n".join(f"    | {line}" for line in sample.splitlines()))

    prompt = codes[: 2 * 300].view(2, 300).to(device)
    lengths = [1, 63, 100, 7, 129]
    print(f"==> a prompt of 300 characters in one call, and in pieces of {', '.join(map(str, lengths))}, state carried")
    whole = logits_in_pieces(model, prompt, [300], config)
    pieces = logits_in_pieces(model, prompt, lengths, config)
    difference = ((pieces - whole).norm() / whole.norm()).item()
    passed.append(check("relative difference of the logits", difference, PIECES_BOUND[config.dtype]))

    print("==> the operator against the float64 token recurrence, on the first layer's activations")
    for name, errors in operator_errors(model, prompt, config).items():
        print(f"    {name} per head: {', '.join(f'{e:.1e}' for e in errors)}")
        worst = max(errors) if all(e == e for e in errors) else float("nan")
        passed.append(check(f"worst head of {name}", worst, ERROR_BOUND[config.dtype]))
    print("==> all checks passed" if all(passed) else "==> FAILED: see above")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
