#!lua flags=allow-oom
-- Opens a trainer session. ARGV: new token, name, lineage of the checkpoint store ('' skips the check). The newest
-- session is current; a fenced token never becomes current again.
local meta = call('HMGET', K.meta, 'lineage', 'trainer')
if ARGV[3] ~= '' and meta[1] and meta[1] ~= ARGV[3] then
  fail('CONFLICT', 'this queue belongs to another checkpoint store')
end
if meta[2] ~= ARGV[1] and call('ZSCORE', K.trainers, ARGV[1]) then
  fail('SESSION_LOST', 'a newer trainer session is open')
end
if ARGV[3] ~= '' then call('HSET', K.meta, 'lineage', ARGV[3]) end
if meta[2] == ARGV[1] then return 1 end
call('ZADD', K.trainers, now(), ARGV[1])
call('ZREMRANGEBYRANK', K.trainers, 0, -65)
call('HSET', K.meta, 'trainer', ARGV[1], 'trainer_name', ARGV[2])
-- The update under way has no time: it would count the time without a trainer (lib/times.lua).
call('HDEL', K.meta, 'cut_at', 'update_began')
return 1
