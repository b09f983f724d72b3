#!lua
-- Opens waiting groups of replayed dead letters, the oldest request first. ARGV: leader, nonce, maximum number of groups.
-- Returns the number of opened groups.
require_leader(ARGV[1])
refuse_while_recovering('admit')
local before = call('HMGET', K.meta, 'replays_nonce', 'replays_opened')
if before[1] == ARGV[2] then return tonumber(before[2]) end

-- Where groups have start ranks, a replay has that of the group of its letter; a letter that was deleted has none.
local function rank_of(letter)
  if call('HGET', K.meta, 'start_ranked') ~= '1' then return nil end
  return call('HGET', letter_key(letter), 'rank') or '0'
end

-- The prompt of the group is stored already.
local function open_replay(gid, letter, needed)
  local sequence = call('HINCRBY', K.meta, 'admission_seq', 1)
  call('HSET', group_key(gid), 'index', sequence, 'needed', needed, 'launched', needed, 'scored', 0, 'terminal', 0,
    'replay_of', letter)
  local rank = rank_of(letter)
  if rank then call('HSET', group_key(gid), 'rank', rank) end
  local prompt = call('HGET', letter_key(letter), 'prompt')
  if prompt then call('HSET', group_key(gid), 'prompt', prompt) end
  if call('HGET', K.limits, 'has_rounds') == '1' then begin_rounds(gid, needed, needed, '{}') end
  local domain = call('HGET', letter_key(letter), 'domain')
  if domain then call('HSET', group_key(gid), 'domain', domain) end
  call('ZADD', K.open, sequence, gid)
  for member = 0, tonumber(needed) - 1 do
    call('ZADD', K.pending, start_place(sequence, rank, member), gid .. '.' .. member)
  end
  call('HINCRBY', K.counts, 'replays_total', 1)
end

local waiting = call('HKEYS', K.replays)
table.sort(waiting, function(a, b)
  return tonumber(string.match(a, '%d+$')) < tonumber(string.match(b, '%d+$'))
end)
local opened = 0
for _, gid in ipairs(waiting) do
  if opened >= tonumber(ARGV[3]) then break end
  -- The third word is that of save_outcomes.
  local needed, letter, ended = string.match(call('HGET', K.replays, gid), '^(%d+) (%S+) ?(%S*)$')
  open_replay(gid, letter, needed)
  if ended ~= '' then call('HSET', group_key(gid), 'ended', 1) end
  call('HDEL', K.replays, gid)
  opened = opened + 1
end
if opened > 0 then call('HSET', K.meta, 'replays_nonce', ARGV[2], 'replays_opened', opened) end
return opened
