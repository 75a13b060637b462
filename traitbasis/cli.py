"""The ``traitbasis`` command. Each command does its imports itself, so that help appears at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.errors import TraitBasisError

if TYPE_CHECKING:
    from traitbasis.model import LanguageModel

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Simulated users with steered traits, for testing AI agents.",
)
basis_app = typer.Typer(no_args_is_help=True, help="Build and inspect the basis that a simulated user draws on.")
app.add_typer(basis_app, name="basis")

out = Console()
err = Console(stderr=True)

Model = Annotated[str, typer.Option(help="Alias (see `traitbasis models`), folder, or hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (float32 on a CPU, the checkpoint's own elsewhere), fastest (on a CPU bfloat16 where that is "
        "measured to pay), float32, bfloat16, float16."
    ),
]
Quantize = Annotated[str | None, typer.Option(help="8bit or 4bit, by bitsandbytes.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="Spread the model over devices, as accelerate does: auto, balanced, sequential.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of torch; by default one for each CPU this process may use.")
]
BasisFile = Annotated[Path | None, typer.Option("--basis", help="Basis file; by default the model's own.")]
Header = Annotated[
    Literal["user", "assistant"],
    typer.Option("--as", help="Template header that the customer's turns stand under."),
]
# Panels of `serve --help`.
_NETWORK, _KEYS, _LIMITS, _LOG = "Network", "API keys", "Limits", "Log"
# The same for `serve` and `chat`, where the basis knows.
HeaderOfBasis = Annotated[
    Literal["user", "assistant"] | None,
    typer.Option("--as", help="Template header of the customer's turns; by default what the basis was made with."),
]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from traitbasis import __version__

        out.print(__version__)
        raise typer.Exit


@app.command()
def models() -> None:
    """List the models that need no hub, and whether they are cached.

    Example: traitbasis models
    """
    from traitbasis.embedded import EMBEDDED, cached_folder

    table = Table("alias", "what it is", "cached")
    for alias, model in EMBEDDED.items():
        folder = cached_folder(alias)
        table.add_row(alias, model.description, str(folder) if folder else f"no ({model.download_mb} MB to fetch)")
    out.print(table)
    out.print("--model also takes a folder with a Hugging Face checkpoint, or a hub id where a hub is reachable.")


@app.command()
def extract(
    trait: Annotated[str, typer.Option(help="A shipped trait, or 'all'.")] = "",
    pairs: Annotated[Path | None, typer.Option(help="Your own pair file instead.")] = None,
    model: Model = DEFAULT_MODEL,
    n_pairs: Annotated[int | None, typer.Option(help="How many pairs; by default those marked 'default'.")] = None,
    span: Annotated[
        Literal["response", "conversation"],
        typer.Option(help="Tokens to average: the response's, or the whole conversation's (the paper's formula)."),
    ] = "response",
    as_: Header = "user",
    out_folder: Annotated[Path, typer.Option("--out", help="Folder; the file is <model>/<trait>.safetensors.")] = Path(
        "vectors"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Responses read together.")] = 8,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Extract trait vectors from contrastive pairs.

    Examples: traitbasis extract --trait impatience; traitbasis extract --pairs mine.yaml --model ./my-model
    """
    from traitbasis.extract import extract as extract_vector
    from traitbasis.pairs import known_traits, load_pairs

    if bool(trait) == (pairs is not None):
        raise typer.BadParameter("give either --trait or --pairs")
    sources = [pairs] if pairs else known_traits() if trait == "all" else [trait]
    pair_sets = [load_pairs(source) for source in sources]  # every file is checked before the model is loaded
    chosen = [pair_set.for_extraction(n_pairs) for pair_set in pair_sets]
    for pair_set in pair_sets:
        for word, gap in pair_set.shortcuts().items():
            err.print(
                f"[yellow]{pair_set.trait}: {escape(repr(word))} tells the sides apart by itself "
                f"({gap:+.0%} of positives against negatives); the vector may write the word and not the trait[/yellow]"
            )
    lm = _load(model, device, dtype)
    with _progress("extracting", 2 * sum(len(pairs) for pairs in chosen)) as advance:
        vectors = [
            extract_vector(lm, pair_set, pairs=pairs, span=span, as_=as_, batch_size=batch_size, progress=advance)
            for pair_set, pairs in zip(pair_sets, chosen, strict=True)
        ]
    for vector in vectors:
        path = vector.save(out_folder / lm.slug / f"{vector.trait}.safetensors")
        middle = vector.n_layers // 2
        table = Table("layer", "response-token norm", "vector norm", "agreement of pairs")
        step = max(1, vector.n_layers // 10)
        for z in sorted({*range(0, vector.n_layers, step), middle, vector.n_layers - 1}):
            table.add_row(
                f"{z}",
                f"{vector.layer_norms[z]:.1f}",
                f"{vector.vector[z].norm():.2f}",
                f"{vector.agreement[z]:+.2f}" if len(vector.provenance.pair_ids) > 1 else "one pair",
                style="bold" if z == middle else None,
            )
        out.print(f"[bold]{vector.trait}[/bold] from {len(vector.provenance.pair_ids)} pairs on {lm.name}")
        out.print(table)
        out.print("saved:", path, soft_wrap=True, markup=False)


@basis_app.command("build")
def basis_build(
    model: Model = DEFAULT_MODEL,
    vectors: Annotated[
        Path | None, typer.Option(help="Folder of trait vectors; by default vectors/<model>.", show_default=False)
    ] = None,
    traits: Annotated[str, typer.Option(help="Traits to take, with commas; by default all.")] = "",
    layer: Annotated[int | None, typer.Option(help="Layer for all traits; by default the middle.")] = None,
    dose: Annotated[float | None, typer.Option(help="Dose of 'medium'; by default the documented one.")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File; by default basis.safetensors among the vectors.")
    ] = None,
) -> None:
    """Choose a layer and a scale for each trait vector and stack them into a basis.

    Example: traitbasis basis build --traits impatience,confusion --layer 15
    """
    from traitbasis.basis import DEFAULT_DOSE, build_basis
    from traitbasis.errors import ArtifactError
    from traitbasis.model import model_slug
    from traitbasis.trait_vector import TraitVector

    folder = vectors or Path("vectors") / model_slug(model)
    names = [name.strip() for name in traits.split(",") if name.strip()]
    files = [folder / f"{name}.safetensors" for name in names] or sorted(
        file for file in folder.glob("*.safetensors") if file.name != "basis.safetensors"
    )
    if not files:
        raise ArtifactError(f"no trait vectors in {folder}; make some with: traitbasis extract --trait all")
    basis = build_basis(
        [TraitVector.load(file) for file in files], layer=layer, dose=DEFAULT_DOSE if dose is None else dose
    )
    path = basis.save(out_file or folder / "basis.safetensors")
    _print_basis(basis)
    out.print("saved:", path, soft_wrap=True, markup=False)


@basis_app.command("show")
def basis_show(
    file: Annotated[Path | None, typer.Argument(help="Basis file; by default the model's own.")] = None,
    model: Model = DEFAULT_MODEL,
) -> None:
    """Print a basis: columns, doses, cosines.

    Example: traitbasis basis show
    """
    from traitbasis.basis import Basis, basis_path
    from traitbasis.model import model_slug

    _print_basis(Basis.load(file or basis_path(model_slug(model))))


@app.command()
def chat(
    traits: Annotated[str, typer.Option(help="Such as impatience-high+skeptical-0.5; none is unsteered.")] = "",
    model: Model = DEFAULT_MODEL,
    basis: BasisFile = None,
    instruction: Annotated[
        str, typer.Option(help="Who the customer is and what they want.")
    ] = "You are a customer of an online shop. Your order #W4417, a desk lamp, is 6 days late. You want a refund.",
    seed: Annotated[int | None, typer.Option(help="Repeat a conversation.")] = None,
    as_: HeaderOfBasis = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Play the agent against a steered customer, in the terminal. An empty line or Ctrl-D ends it.

    Example: traitbasis chat --traits impatience-high
    """
    from traitbasis.simulator import UserSimulator

    lm = _load(model, device, dtype)
    with UserSimulator(lm, basis, as_=as_) as user:
        user.basis.parse(traits)  # complain before the first line is typed
        messages = [{"role": "system", "content": instruction}]
        out.print(f"[dim]{escape(instruction)}[/dim]")
        out.print("[dim]You are the agent. An empty line ends the conversation.[/dim]")
        while line := _read_line("agent> "):
            messages.append({"role": "user", "content": line})
            with err.status("…"):
                turn = user.reply(messages, traits, seed=seed)
            out.print(f"[bold]customer>[/bold] {escape(turn.text)}", highlight=False)
            out.print(f"[dim]dose {turn.dose:.2f}, seed {turn.seed}[/dim]")
            messages.append({"role": "assistant", "content": turn.text})


@app.command()
def serve(
    model: Model = DEFAULT_MODEL,
    basis: BasisFile = None,
    users: Annotated[
        Path | None, typer.Option(help="YAML file of named users: traits, persona, sampling, guards (docs/users.md).")
    ] = None,
    guards: Annotated[
        bool, typer.Option(help="Draw unusable turns again; without, text is streamed as it is generated.")
    ] = True,
    as_: HeaderOfBasis = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_NETWORK)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.", rich_help_panel=_NETWORK)] = 8000,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Pages of this origin (https://example.com, or * for any) may ask from a browser; give it several "
            "times for several.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    shutdown_seconds: Annotated[
        int,
        typer.Option(min=0, help="Time for running turns to finish when told to stop.", rich_help_panel=_NETWORK),
    ] = 25,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="File with an API key a line (# comments). Requests then need one, but for /health, /ready and the "
            "page. TRAITBASIS_API_KEYS, with commas, adds more.",
            rich_help_panel=_KEYS,
        ),
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Give /metrics without a key.", rich_help_panel=_KEYS)
    ] = False,
    max_batch: Annotated[int, typer.Option(min=1, help="User turns generated together.", rich_help_panel=_LIMITS)] = 32,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; more are answered 429.", rich_help_panel=_LIMITS)
    ] = 256,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a conversation and its reply; by default the model's limit.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    prefix_cache_mb: Annotated[
        int,
        typer.Option(
            min=0,
            help="Memory for keys and values of conversations' beginnings; 0 turns it off.",
            rich_help_panel=_LIMITS,
        ),
    ] = 1024,
    max_body_kb: Annotated[
        int, typer.Option(min=1, help="Size of a request; more is answered 400.", rich_help_panel=_LIMITS)
    ] = 2048,
    max_messages: Annotated[
        int, typer.Option(min=1, help="Messages of a conversation; more are answered 400.", rich_help_panel=_LIMITS)
    ] = 2048,
    max_output_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a reply; a max_tokens beyond is cut to it.", rich_help_panel=_LIMITS)
    ] = 4096,
    log_format: Annotated[
        Literal["json", "text"],
        typer.Option(help="Form of the log, which goes to standard output.", rich_help_panel=_LOG),
    ] = "json",
    log_text: Annotated[bool, typer.Option("--log-text", help="Log what was said, too.", rich_help_panel=_LOG)] = False,
) -> None:
    """Serve the simulated user behind the OpenAI protocol.

    Example: traitbasis serve --port 8000, then point a harness at http://127.0.0.1:8000/v1 with the model
    steered-user@impatience-high+skeptical-0.5
    """
    import os
    import re

    from traitbasis.engines.transformers import TransformersEngine
    from traitbasis.guards import GUARDS
    from traitbasis.server import Limits, Settings, create_app
    from traitbasis.server.keys import read_keys
    from traitbasis.server.logs import configure
    from traitbasis.server.operation import Server
    from traitbasis.simulator import UserSimulator
    from traitbasis.users import read_users

    # Everything that can be wrong is, before a minute of loading.
    for origin in cors_origin or ():
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise TraitBasisError(f"--cors-origin {origin!r} is no origin; write it as https://example.com, or *")
    settings = Settings(
        api_keys=read_keys(api_keys, os.environ),
        open_metrics=open_metrics,
        limits=Limits(max_body_kb * 1024, max_messages, max_output_tokens),
        cors_origins=tuple(cors_origin or ()),
        log_text=log_text,
    )
    served = read_users(users) if users else []
    if not _is_loopback(host, port) and not settings.api_keys:
        err.print(
            f"[yellow]warning: {escape(host)} can be reached from other machines and there are no API keys, so whoever "
            "reaches it may use it; set --api-keys or TRAITBASIS_API_KEYS, or listen on 127.0.0.1[/yellow]",
            soft_wrap=True,
        )
    configure(log_format)
    lm = _load(model, device, dtype, quantize, device_map, threads)
    engine = TransformersEngine(
        lm,
        max_batch=max_batch,
        max_queue=max_queue,
        max_context=max_context,
        prefix_cache_bytes=prefix_cache_mb * 2**20,
    )
    with UserSimulator(lm, basis, as_=as_, engine=engine, guards=GUARDS if guards else ()) as simulator:
        how = f"up to {max_batch} turns at once" if engine.continuous else "in micro-batches (see the warning)"
        err.print(f"{lm.name} in {lm.dtype_name} on {lm.device}, {how}", highlight=False)
        app = create_app(simulator, settings, served)
        names = ["steered-user", *(user.name for user in served if user.name != "steered-user")]
        err.print(f"traits: {', '.join(simulator.basis.traits)}; model ids: {', '.join(names)}, NAME@<traits>")
        Server(app, engine.close, host=host, port=port, shutdown_seconds=shutdown_seconds).run()


def _is_loopback(host: str, port: int) -> bool:
    """Whether only this machine can reach the address. Raises TraitBasisError when it cannot be listened on."""
    from ipaddress import ip_address
    from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOL_SOCKET, socket

    with socket(AF_INET6 if ":" in host else AF_INET) as probe:
        probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = f"{error.strerror}; choose another --host or --port"
            raise TraitBasisError(f"cannot listen on {host}:{port}: {reason}") from error
        return ip_address(probe.getsockname()[0]).is_loopback


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="Alias, folder, or hub id.")] = DEFAULT_MODEL,
    basis: BasisFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device_map: DeviceMap = None,
) -> None:
    """Check on your model and machine that steering does what it says; exit status 1 when a check fails.

    Without a basis for the model, random directions stand in.

    Example: traitbasis verify ./Llama-3.1-8B-Instruct
    """
    from traitbasis.basis import find_basis
    from traitbasis.errors import ArtifactError
    from traitbasis.verify import verify as run_checks

    lm = _load(model, device, dtype, quantize, device_map)
    try:
        found = find_basis(lm, basis)
    except ArtifactError as error:
        if basis is not None:
            raise
        found = None
        err.print(f"{error}\nUsing random directions.", soft_wrap=True, markup=False)
    failed = 0
    for check in run_checks(lm, found):
        mark = {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "[dim]  - [/dim]"}[check.passed]
        out.print(f"{mark}  [bold]{check.name}[/bold]: {escape(check.detail)}", soft_wrap=True, highlight=False)
        failed += check.passed is False
    if failed:
        err.print(f"[red]{failed} check{'s' * (failed > 1)} failed on {escape(lm.name)}[/red]")
        raise typer.Exit(1)


@app.command()
def bench(
    model: Model = DEFAULT_MODEL,
    basis: BasisFile = None,
    users: Annotated[str, typer.Option(help="Concurrent users, with commas.")] = "1,8,32",
    turns: Annotated[int, typer.Option(min=2, help="Longest conversation.")] = 20,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a reply.")] = 32,
    only: Annotated[str, typer.Option(help="Some of the measurements, with commas.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats: a look, no figures to publish.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the figures as JSON, too.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
) -> None:
    """Measure the engine on this machine: throughput, the price of steering, time to first token, against generate.

    Example: traitbasis bench --quick --only throughput,steering
    """
    import json

    from traitbasis.basis import find_basis
    from traitbasis.bench import MEASUREMENTS, Workload, made_with, measure

    names = [name.strip() for name in only.split(",") if name.strip()] or list(MEASUREMENTS)
    counts = [count.strip() for count in users.split(",")]
    if unknown := set(names) - set(MEASUREMENTS):
        raise typer.BadParameter(f"unknown measurement {', '.join(sorted(unknown))}; known: {', '.join(MEASUREMENTS)}")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise typer.BadParameter(f"--users is {users!r}; it takes numbers from 1 on, with commas")
    lm = _load(model, device, dtype, quantize, device_map, threads)
    load = Workload(lm, find_basis(lm, basis), tokens)
    figures: dict[str, Any] = {"made_with": made_with(load)}
    measured = measure(load, sorted(map(int, counts)), turns=turns, quick=quick, only=names)
    while True:
        with err.status("measuring"):
            name, found = next(measured, ("", None))
        if not name:
            break
        figures[name] = found
        table = Table(name, "figure")
        for of, figure in _flat(found):
            table.add_row(of, figure)
        out.print(table)
        if out_file:  # after each: a long run that ends early keeps what it has
            temporary = out_file.with_name(out_file.name + ".part")
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(figures, indent=1, default=vars) + "\n")
            temporary.replace(out_file)
    if out_file:
        out.print("saved:", out_file, soft_wrap=True, markup=False)


def _flat(figures: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Rows of a table from nested figures."""
    if isinstance(figures, dict):
        for key, value in figures.items():
            yield from _flat(value, (*path, str(key).replace("_", " ")))
    elif isinstance(figures, list):
        yield " / ".join(path), " ".join(_number(value) for value in figures)
    else:
        yield " / ".join(path), _number(figures)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@app.command()
def demo(
    model: Model = DEFAULT_MODEL,
    seed: Annotated[int, typer.Option(help="Another conversation.")] = 12,
) -> None:
    """Extract the four traits and show one conversation four ways, side by side.

    Example: traitbasis demo
    """
    from traitbasis.demo import run_demo

    run_demo(_load(model, "auto", "auto"), seed=seed, console=out, progress=_progress)


def main() -> None:
    """Entry point: a known error is one line on stderr and exit status 1, without a traceback."""
    try:
        app()
    except (TraitBasisError, OSError) as error:  # OSError names the file itself
        err.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(1) from None


def _load(
    model: str,
    device: str,
    dtype: str,
    quantize: str | None = None,
    device_map: str | None = None,
    threads: int | None = None,
) -> LanguageModel:
    with err.status("importing torch") as status:
        from traitbasis.cpu import set_threads
        from traitbasis.model import load_model

        set_threads(threads)

        def say(message: str) -> None:
            status.update(escape(message))
            if not err.is_terminal:
                err.print(message, soft_wrap=True, markup=False)

        return load_model(model, device=device, dtype=dtype, quantize=quantize, device_map=device_map, say=say)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.progress import Progress

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def _print_basis(basis: Any) -> None:
    title = f"basis {basis.fingerprint} of {basis.model}"
    table = Table("trait", "layer", "scale", "dose of medium", "pairs", title=title)
    for column in basis.columns:
        table.add_row(
            column.trait,
            f"{column.layer}",
            f"{column.scale:.3f}",
            f"{basis.dose({column.trait: 1.0}):.3f}",
            f"{len(column.provenance.pair_ids)}",
        )
    out.print(table)
    cosines = Table("cosine", *basis.traits)
    for trait, row in zip(basis.traits, basis.cosine().tolist(), strict=True):
        cosines.add_row(trait, *(f"{value:+.2f}" for value in row))
    out.print(cosines)


def _read_line(prompt: str) -> str:
    try:
        return out.input(prompt, markup=False).strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
