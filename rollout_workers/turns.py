"""The walk of one turn: match, render what is new, check the budget, sample, commit, tell.

Nothing is recorded before the engine's reply has passed every check, and nothing awaits between
the commit and the answer.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from typing import Any

import numpy as np

from rollout_workers.config import PoolConfig
from rollout_workers.engine import EngineClient
from rollout_workers.errors import ContextOverflow, PoolNotReady
from rollout_workers.generation import Generation
from rollout_workers.identity import new_response_id
from rollout_workers.ledger import Message, Plan, Sampled, root_key
from rollout_workers.reply import Reply, build
from rollout_workers.responses import Request
from rollout_workers.routing import Choice, Roster
from rollout_workers.schema import Ids, TurnRecord
from rollout_workers.sessions import Session
from rollout_workers.template import ChatTemplate

Json = dict[str, Any]
_LONG_TEXT = 20_000  # characters; rendering more than this would hold up the event loop
_TAIL = 4  # tokens an engine can hold beyond its longest prompt


class Turns:
    """Owns what all turns of a shard share: template, engine connections, and token counts."""

    def __init__(
        self, shard: int, config: PoolConfig, template: ChatTemplate, roster: Roster
    ) -> None:
        self._shard, self._config, self._template = shard, config, template
        self._root = root_key(template.digest, template.options)
        self._roster = roster
        self._engines = EngineClient()
        self.counts: Counter[str] = Counter()

    async def close(self) -> None:
        """Close the engine connections."""
        await self._engines.close()

    async def run(self, session: Session, request: Request) -> Json:
        """Sample one turn and return its Response object; see ``Router.respond`` for errors."""
        plan = session.ledger.plan(self._root, request.messages, self._template.bridgeable)
        new = request.messages[plan.new_from :]
        context = await self._context(session, plan, new)
        prompt = context
        if plan.anchor is not None:
            prompt = np.concatenate([session.ledger.prompt(plan.anchor), context])
        limit, clamped = self._budget(request.max_output_tokens, len(prompt))
        response_id = new_response_id(self._shard, session.id)
        choice = self._roster.choose(session.id, len(prompt) + limit)
        try:
            generation = await self._engines.generate(
                choice.worker,
                response_id,
                prompt,
                request.sampling,
                limit,
                self._config.router.request_timeout_s,
            )
        finally:
            self._roster.release(choice)
        sampled = _sampled(generation, request, choice, response_id, clamped)
        text = self._text(generation)
        number = session.ledger.commit(
            plan, context, sampled, Message(role="assistant", content=text)
        )
        self._note(session, new, text, response_id, number)
        self._count(len(prompt), generation)
        return self._tell(session, request, number, prompt, sampled, text)

    async def _context(self, session: Session, plan: Plan, new: tuple[Message, ...]) -> Ids:
        work = functools.partial(self._template.render, new)
        if plan.anchor is not None:
            last = session.ledger.ends_with(plan.anchor)
            work = functools.partial(self._template.continuation, new, last)
        if sum(len(message.content) for message in new) > _LONG_TEXT:
            return await asyncio.to_thread(work)
        return work()

    def _budget(self, asked: int | None, prompt: int) -> tuple[int, bool]:
        """Tokens this turn may generate, and whether that is less than was asked for."""
        serving = self._roster.serving
        if not serving:
            raise PoolNotReady("no worker serves now; `rollout-workers status` says why")
        longest = min(worker.max_prompt_tokens for worker in serving)
        if prompt > longest:
            raise ContextOverflow(
                f"the prompt has {prompt} tokens, more than the model's context length allows "
                f"({longest})",
                "input",
            )
        left = longest + _TAIL - prompt
        return (left, False) if asked is None else (min(asked, left), asked > left)

    def _note(
        self,
        session: Session,
        new: tuple[Message, ...],
        text: str,
        response_id: str,
        number: int,
    ) -> None:
        items = [{"role": m.role, "content": m.content} for m in new]
        session.items.append([*items, {"role": "assistant", "content": text}])
        session.responses[response_id] = number

    def _count(self, num_prompt: int, generation: Generation) -> None:
        self.counts["turns"] += 1
        self.counts["prompt_tokens"] += num_prompt
        self.counts["cached_tokens"] += generation.cached_tokens
        self.counts["generated_tokens"] += len(generation.ids)

    def _tell(
        self,
        session: Session,
        request: Request,
        number: int,
        prompt: Ids,
        sampled: Sampled,
        text: str,
    ) -> Json:
        wanted = request.return_token_ids
        reply = Reply(
            response_id=sampled.record.response_id,
            model=request.model or self._config.engine.model,
            text=text,
            prompt=prompt,
            sampled=sampled,
            created_at=time.time(),
            rollout=_rollout(session, number, sampled),
        )
        return build(
            request, reply, self._config.router.return_token_ids if wanted is None else wanted
        )

    def _text(self, generation: Generation) -> str:
        """What the model said, without the token or string that stopped it."""
        ids, matched = generation.ids, generation.matched
        if isinstance(matched, int) and len(ids) and int(ids[-1]) == matched:
            ids = ids[:-1]
        text = self._template.decode(ids)
        # The engine stops at the first occurrence; its last token may hold more than that.
        cut = text.find(matched) if isinstance(matched, str) else -1
        return text if cut < 0 else text[:cut]


def _rollout(session: Session, number: int, sampled: Sampled) -> Json:
    record = sampled.record
    return {
        "session_id": session.id,
        "trajectory_id": session.trajectory_id,
        "turn": number,
        "segment_reason": str(session.ledger.turns[number].reason),
        "finish_reason": record.finish_reason,
        "versions": [[span.start, span.end, span.version] for span in sampled.spans],
        "worker": record.worker,
        "attempt": record.attempt,
        "clamped": record.clamped,
    }


def _sampled(
    generation: Generation, request: Request, choice: Choice, response_id: str, clamped: bool
) -> Sampled:
    sampling = request.sampling
    record = TurnRecord(
        response_id=response_id,
        start=0,
        end=len(generation.ids),
        finish_reason=generation.finish_reason,
        worker=choice.worker.name,
        seconds=generation.seconds,
        cached_tokens=generation.cached_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        penalties=sampling.penalised,
        truncated_sampling=sampling.truncated,
        clamped=clamped,
    )
    return Sampled(
        ids=generation.ids, logprobs=generation.logprobs, spans=generation.spans, record=record
    )
