#!lua flags=allow-oom
-- ARGV: fresh token, name, lineage of the checkpoint store ('' asks nothing). The newest wins; a token that was fenced
-- once never comes back.
if ARGV[3] ~= '' then
  local known = call('HGET', K.meta, 'lineage')
  if known and known ~= ARGV[3] then fail('CONFLICT', 'this queue belongs to another checkpoint store') end
  call('HSET', K.meta, 'lineage', ARGV[3])
end
if call('HGET', K.meta, 'trainer') == ARGV[1] then return 1 end
if call('ZSCORE', K.trainers, ARGV[1]) then fail('SESSION_LOST', 'a newer trainer session is open') end
call('ZADD', K.trainers, now(), ARGV[1])
call('ZREMRANGEBYRANK', K.trainers, 0, -65)
call('HSET', K.meta, 'trainer', ARGV[1], 'trainer_name', ARGV[2])
return 1
