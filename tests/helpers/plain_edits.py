"""Score edits done once more, as plainly as possible: a loop over the vocabulary of one row.

Independent of the package.
"""


def edited(logits, prompt, generated, params, eos_token_ids=()):
    """The logits from which the token after `prompt` and `generated` is drawn."""
    ends = {*eos_token_ids, *params.stop_token_ids}
    scores = []
    for token, logit in enumerate(logits):
        score = logit + params.logit_bias.get(token, 0.0)
        count = sum(t == token for t in generated)
        if count or token in prompt:
            factor = params.repetition_penalty
            score = score / factor if score > 0 else score * factor
        score -= params.frequency_penalty * count
        if count:
            score -= params.presence_penalty
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        is_early = token in ends and len(generated) < params.min_tokens
        if not is_allowed or token in params.bad_token_ids or is_early:
            score = float("-inf")
        scores.append(score)
    return scores
