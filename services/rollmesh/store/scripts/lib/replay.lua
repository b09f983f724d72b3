-- uses: core rounds
-- A replay waits until the staleness bound and memory allow one more group. The bounds equal those of the scheduler.
local ADMISSION_SHARE = 0.8

local function has_room_for_a_group()
  -- docs/architecture.md: The staleness bound
  local limits = call('HMGET', K.limits, 'max_staleness', 'groups_per_batch', 'window_groups')
  local window = tonumber(limits[3] or '0')
  if window == 0 then window = (tonumber(limits[1]) + 1) * tonumber(limits[2]) end
  local admitted = call('ZCARD', K.open) + call('ZCARD', K.ready) + call('HLEN', K.cut)
  if admitted >= window then return false end
  local memory = call('INFO', 'memory')
  local limit = tonumber(string.match(memory, '\nmaxmemory:(%d+)'))
  return limit == 0 or tonumber(string.match(memory, 'used_memory:(%d+)')) < ADMISSION_SHARE * limit
end

-- The prompt of the group is stored already.
local function open_replay(gid, letter, needed)
  local sequence = call('HINCRBY', K.meta, 'admission_seq', 1)
  call('HSET', group_key(gid), 'index', sequence, 'needed', needed, 'launched', needed, 'scored', 0, 'terminal', 0,
    'member_steps', 1, 'replay_of', letter)
  local prompt = call('HGET', letter_key(letter), 'prompt')
  if prompt then call('HSET', group_key(gid), 'prompt', prompt) end
  if call('HGET', K.limits, 'has_rounds') == '1' then begin_rounds(gid, needed, needed, '{}') end
  local domain = call('HGET', letter_key(letter), 'domain')
  if domain then call('HSET', group_key(gid), 'domain', domain) end
  call('ZADD', K.open, sequence, gid)
  for member = 0, tonumber(needed) - 1 do
    call('ZADD', K.pending, sequence * 4096 + member, gid .. '.' .. member)
  end
  call('HINCRBY', K.counts, 'replays_total', 1)
end
