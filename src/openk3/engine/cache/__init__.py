"""The prefix cache of a hybrid model: latents that grow, states that do not, one pool of pages.

A prefix of a prompt may be skipped only when both kinds of memory come back at the same token: the
MLA latents of every position before it, and the KDA state at it (K3 report §5.3.1, §5.4.1).

Units. A hash block is `hash_block` tokens: the grain at which prefixes are told apart and reused. A
page is the unit of allocation: `page_tokens` latents of the layers of one group (a multiple of the
hash block), or the states of one KDA group. All pages are equal, one free list serves all groups.

Keys (`hashing`). Block i of a sequence has the key  k_i = hash(k_(i-1), its token ids, the pictures
that overlap it), with  k_(-1) = hash(weights version, salt, block size).  A key so names a whole
prefix, under one set of weights, for one tenant.

Holdings (`store`). Pages under one reference count: one latent page, or one page in EVERY KDA group
(a checkpoint). `refs` counts the sequences and copies that need it now. `keys` are the prefixes it
can be found by; `end` is the token position it is good for: for a checkpoint exactly that position,
for a latent page the end of the last registered block in it. A page is always in one of three
places: blank (nothing in it), idle (refs 0, findable; least recently used goes first), or held.

Lookup (`lookup`), two stages. 1: from the left, the longest chain of pages whose last block is
known, then the longest known end inside the first page that is not. 2: from that end leftwards,
the first block end with a checkpoint. Never more than prompt length - 1: one token must be
computed. A chain that reaches further than its best checkpoint tells that two prompts part there;
this prefill then leaves a checkpoint at that point, so that a third prompt finds it.

A hit shares whole pages, copies the page it ends in (or goes on in it, when nobody else does and
nothing is registered behind that end), and copies the checkpoint into the sequence's own state.

Checkpoints. Every pass leaves one at the last block end that it crosses; the next supersedes it,
and its pages are recycled. Kept are those at turn ends: the last block ends before the end of the
prompt (also before its last token, so that the same prompt sent again hits), before the ends of its
first messages, and before the end of the answer.

What must hold, hardest first (`checks` tests all of it, every step in debug mode):

1. Pinned before allocated. Everything that a plan reads or writes is held from before the first
   page of that plan is taken until the plan has landed. So an allocation can never take the page of
   a hit, in any group, and no page id has two owners.
2. Findable means written. A key enters the index after the pass or copy that wrote its bytes has
   landed, and nothing at or before `end` is written while a key leads there. A live sequence writes
   only at positions no smaller than what it has computed, in pages that it alone holds.
3. All groups or none, at one position. A checkpoint is one holding: its pages are found, pinned,
   evicted, written to the host and brought back together. It carries its own position, which is
   compared with the position asked for whenever it is restored. No sequence runs in its pages.

The host tier is a second store with its own page ids. What the pool evicts is written back to it,
what a hit finds there is brought into fresh pages; both are copies of the step's plan, in order.
"""

from openk3.engine.cache.lookup import Hit
from openk3.engine.cache.memory import Memory

__all__ = ["Hit", "Memory"]
