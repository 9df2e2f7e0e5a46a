"""From hidden states to tokens.

A row that samples has one sampled position, after its last token; with d drafts it has 1 + d, after each of its tokens. At each,
for logits z (the head's fp32), in this order:

- mask: z_i = -inf for every token i that is not in the row's allowed ids (if it has any), is in its banned ids, or is not allowed
  by the position's grammar mask. If no token is left, the position fails (NO_ALLOWED_TOKEN).
- bias: z_i += b_i.
- penalties, over the tokens before the position (`history`): c_i = how often token i is in the output, seen_i = whether it is in
  the prompt or the output. Where seen_i: z_i = z_i / r if z_i > 0 else z_i * r (Keskar et al., "CTRL", 2019). Then
  z_i -= frequency * c_i + presence * [c_i > 0].
- temperature t: z / t; t = 0 is greedy: argmax z, whatever the filters.
- top-k: keeps the k largest logits.
- top-p: of the renormalized rest, in falling order, keeps every token before which the probabilities sum up to less than p
  (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020).
- min-p: keeps tokens whose probability is at least min_p times the largest one (Nguyen et al., "Turning Up the Heat", 2024).
- draw: the first token, in order of ids, at which the cumulated probability of the kept ones exceeds u times their sum. u is a
  function of (seed, position of the sampled token), see `random_numbers`.

Ties go to the lowest id everywhere. Finite logits stay finite: what would leave the range of fp32 by bias or penalties is set to
its end. RAW logprobs are log softmax of z before all of this, PROCESSED ones those of the distribution that is drawn from (t = 1
where greedy). Drafts are accepted while each equals the sample before it: see `verification`.
"""

from modelworker.worker.sampling.history import TokensBefore
from modelworker.worker.sampling.sampler import ROWS_AT_ONCE, SampledStep, Sampler, SamplingPlan

__all__ = ["ROWS_AT_ONCE", "SampledStep", "Sampler", "SamplingPlan", "TokensBefore"]
