#!lua flags=allow-oom
-- Applies a batch file: its groups become consumed if trained, else cut and confirmed, independent of their state here.
-- One call takes the whole file, so that no leader reads any of them as open or ready. forget_groups deletes the records.
-- ARGV: trainer, train step, digest, trained (1|0), all group ids in order.
adopt_trainer(ARGV[1])
local step, digest, trained = ARGV[2], ARGV[3], ARGV[4] == '1'
local gids, named, marks = {unpack(ARGV, 5)}, {}, {}
local replays = tonumber(call('HGET', K.meta, 'replay_seq') or '0')
for _, gid in ipairs(gids) do
  named[gid] = true
  replays = math.max(replays, tonumber(string.match(gid, 'r(%d+)$') or '0'))
  marks[#marks + 1] = trained and step or gid
  marks[#marks + 1] = trained and gid or step
end
-- Until the end of the re-assertion, save_outcomes tells by it which replays Redis has lost.
call('HSETNX', K.meta, 'replays_before', call('HGET', K.meta, 'replay_seq') or 0)
call('HSET', K.meta, 'replay_seq', replays)

-- Other groups of an unconfirmed cut of this step become ready again.
for _, gid in ipairs(call('LRANGE', batch_groups_key(step), 0, -1)) do
  local group = not named[gid] and load_group(gid)
  if group then
    call('HDEL', K.cut, gid)
    call('ZADD', K.ready, group.index, gid)
    call('ZADD', K.ready_steps, group.step or '+inf', gid)
    call('ZADD', K.ready_tokens, group.tokens, gid)
  end
end
call('UNLINK', batch_groups_key(step))
call('HDEL', K.replays, unpack(gids))
for _, queue in ipairs({K.open, K.ready, K.open_steps, K.ready_steps, K.ready_tokens, K.aside, K.undecided}) do
  call('ZREM', queue, unpack(gids))
end
if trained then
  call('HDEL', K.cut, unpack(gids))
  call('ZADD', K.tombstones, unpack(marks))
else
  call('ZREM', K.tombstones, unpack(gids))
  call('HSET', K.cut, unpack(marks))
  call('RPUSH', batch_groups_key(step), unpack(gids))
  call('HSET', batch_key(step), 'digest', digest)
end
count('reasserted_groups_total', #gids)
flush_counts()
return #gids
