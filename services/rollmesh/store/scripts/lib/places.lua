-- Places of trajectories in the queues `pending` and `partial`. A place by rank, 0 to 127 and the lowest first, holds within
-- blocks of as many groups as a batch has. Blocks stay in admission order, so no group waits for more than one block of
-- later ones. A place is a whole number below 2^53 up to 2^23 blocks.
local LAST_RANK, MOST_GROUPS = 127, 2048

local block_groups
local function ranked_place(index, rank, member)
  block_groups = block_groups or tonumber(call('HGET', K.limits, 'groups_per_batch'))
  local position = (index - 1) % block_groups
  local block = (index - 1 - position) / block_groups
  return order_of((block * (LAST_RANK + 1) + rank) * MOST_GROUPS + position, member)
end

-- Place in `pending`: by the rank that the leader gave the group, else in admission order.
local function start_place(index, rank, member)
  return rank and ranked_place(index, tonumber(rank), member) or order_of(index, member)
end

local function rank_of_length(tokens)
  return math.min(LAST_RANK - 1, length_bucket(math.max(0, tokens)))
end

-- Rank by the tokens to the mean length of the scored siblings; last without one, and past that length.
local function rank_by_end(group, tokens)
  if group.scored == 0 then return LAST_RANK end
  local left = group.tokens / group.scored - tokens
  return left > 0 and rank_of_length(left) or LAST_RANK
end

-- Place in `partial`, by the resume order of the run: 1 most tokens first, 2 nearest to its end first.
local resume_order
local function resume_place(group, member, tokens)
  resume_order = resume_order or call('HGET', K.limits, 'resume_order') or '0'
  if resume_order == '1' then return ranked_place(group.index, LAST_RANK - rank_of_length(tokens), member) end
  if resume_order == '2' then return ranked_place(group.index, rank_by_end(group, tokens), member) end
  return order_of(group.index, member)
end
