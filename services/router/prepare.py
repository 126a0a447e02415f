"""From a chat, in whatever API it was asked, to what is ready to run: prompt, options, and how the output is read."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import Request

from services.router.answer import submission_of
from services.router.chat.client_names import renamed
from services.router.chat.output import ChatOutput, ParserOf
from services.router.chat.plan import plan_chat
from services.router.chat.schema import ChatRequest
from services.router.front import Front, Submission
from services.router.reply_spec import ReplySpec
from services.router.sampling_schema import SamplingRequest
from services.router.trace import timings_of


class PreparedChat(msgspec.Struct, frozen=True):
    """`parser_of` makes the parser of each sample's output; None reads all of it as content."""

    submission: Submission
    spec: ReplySpec
    parser_of: ParserOf | None

    def output(self) -> ChatOutput:
        """The state of one sample's output."""
        return ChatOutput(self.parser_of, self.spec.detokenizer)


async def prepare_chat(
    front: Front, request: Request, asked: ChatRequest, arrival: float, names: Mapping[str, str] | None = None
) -> PreparedChat:
    """Renders and tokenizes the chat, and plans how it is run. Raises NotFoundError for another model,
    InvalidRequestError for what this model can't do; what comes up later is told in the client's `names` of fields."""
    names = names or {}
    model = front.check_model(asked.model)
    text = await front.render_chat(asked.chat())
    plan = plan_chat(asked, front.model.format, text)
    options = front.options(asked, None, plan.grammar)
    field = options.grammar_field
    options = msgspec.structs.replace(
        options,
        kept_special_ids=plan.kept_special_ids,
        grammar_field=renamed(field, names),
        goes_on=bool(asked.continue_final_message),
    )
    prompt = await front.encode_text(text, add_special_tokens=False, field=names.get("messages", "messages"))
    submission = submission_of(request, asked, [prompt], options, arrival)
    return PreparedChat(submission, reply_spec(front, asked, submission, model), plan.parser_of)


def reply_spec(front: Front, asked: SamplingRequest, submission: Submission, model: str) -> ReplySpec:
    """What the reply to a request has to show."""
    options = submission.options
    return ReplySpec(
        request_id=submission.request_id,
        model=model,
        prompts=submission.prompts,
        tokenizer=front.tokenizer,
        samples=options.n,
        keep=asked.n or 1,
        token_ids=options.return_token_ids,
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        skip_special_tokens=options.skip_special_tokens,
        goes_on=options.goes_on,
        kept_special_ids=options.kept_special_ids,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        logprobs=asked.best_tokens(),
        prompt_logprobs=asked.prompt_logprobs,
        timings=timings_of if submission.timings else None,
        system_fingerprint=front.system_fingerprint,
    )
