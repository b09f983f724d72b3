#!lua flags=allow-oom
-- uses: fence adopt group
-- Groups of a batch file: trained ones are consumed, the others cut and confirmed, whatever the queue believed.
-- ARGV: trainer, train step, digest, trained (1|0), first call of the step (1|0), group ids of this slice.
adopt_trainer(ARGV[1])
local step, digest, trained = ARGV[2], ARGV[3], ARGV[4] == '1'

-- An unconfirmed cut of this step, or a slice of an earlier attempt, gives way to the batch file.
if ARGV[5] == '1' then
  for _, gid in ipairs(call('LRANGE', batch_groups_key(step), 0, -1)) do
    local group = load_group(gid)
    if group then
      call('HDEL', K.cut, gid)
      call('ZADD', K.ready, group.index, gid)
      call('ZADD', K.ready_steps, group.step or '+inf', gid)
    end
  end
  call('UNLINK', batch_groups_key(step))
end

local replays = tonumber(call('HGET', K.meta, 'replay_seq') or '0')
for at = 6, #ARGV do
  local gid = ARGV[at]
  replays = math.max(replays, tonumber(string.match(gid, 'r(%d+)$') or '0'))
  local group = load_group(gid)
  if group then
    delete_members(group)
    call('UNLINK', group_key(gid))
    call('ZREM', K.open, gid)
    call('ZREM', K.ready, gid)
    call('ZREM', K.open_steps, gid)
    call('ZREM', K.ready_steps, gid)
  end
  if trained then
    call('HDEL', K.cut, gid)
    call('ZADD', K.tombstones, step, gid)
  else
    call('HSET', K.cut, gid, step)
    call('RPUSH', batch_groups_key(step), gid)
  end
end
if not trained then call('HSET', batch_key(step), 'digest', digest) end
call('HSET', K.meta, 'replay_seq', replays)
count('reasserted_groups_total', #ARGV - 5)
flush_counts()
return #ARGV - 5
