"""Commands that run a simulated user."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from traitbasis.cli.common import (
    BasisFile,
    Device,
    DeviceMap,
    Dtype,
    HeaderOfBasis,
    Model,
    Quantize,
    Threads,
    app,
    err,
    load_lm,
    out,
    progress,
)
from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.errors import TraitBasisError

# Panels of `serve --help`.
_NETWORK, _KEYS, _LIMITS, _LOG = "Network", "API keys", "Limits", "Log"


@app.command()
def demo(
    model: Model = DEFAULT_MODEL,
    seed: Annotated[int, typer.Option(help="Another conversation.")] = 12,
) -> None:
    """Extract the four traits and show one conversation four ways, side by side.

    Example: traitbasis demo
    """
    from traitbasis.demo import run_demo

    run_demo(load_lm(model, "auto", "auto"), seed=seed, console=out, progress=progress)


@app.command()
def chat(
    traits: Annotated[str, typer.Option(help="Such as impatience-high+skeptical-0.5; none is unsteered.")] = "",
    model: Model = DEFAULT_MODEL,
    basis: BasisFile = None,
    instruction: Annotated[
        str, typer.Option(help="Who the customer is and what they want.")
    ] = "You are a customer of an online shop. Your order #W4417, a desk lamp, is 6 days late. You want a refund.",
    seed: Annotated[int | None, typer.Option(help="Repeat a conversation.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Beyond the limit that calibration found, and traits not steerable here.")
    ] = False,
    as_: HeaderOfBasis = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Play the agent against a steered customer, in the terminal. An empty line or Ctrl-D ends it.

    Example: traitbasis chat --traits impatience-high
    """
    from traitbasis.simulator import UserSimulator

    lm = load_lm(model, device, dtype)
    with UserSimulator(lm, basis, as_=as_) as user:
        messages = [{"role": "system", "content": instruction}]
        user.prepare([*messages, {"role": "user", "content": "Hi"}], traits, force=force)  # complain before it begins
        out.print(f"[dim]{escape(instruction)}[/dim]")
        out.print("[dim]You are the agent. An empty line ends the conversation.[/dim]")
        while line := _read_line("agent> "):
            messages.append({"role": "user", "content": line})
            with err.status("…"):
                turn = user.reply(messages, traits, seed=seed, force=force)
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
    lm = load_lm(model, device, dtype, quantize, device_map, threads)
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


def _read_line(prompt: str) -> str:
    try:
        return out.input(prompt, markup=False).strip()
    except EOFError:
        return ""
