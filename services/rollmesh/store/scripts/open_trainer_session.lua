#!lua flags=allow-oom
-- ARGV: fresh token, name. The newest wins; a token that was fenced once never comes back.
if call('HGET', K.meta, 'trainer') == ARGV[1] then return 1 end
if call('ZSCORE', K.trainers, ARGV[1]) then fail('SESSION_LOST', 'a newer trainer session is open') end
call('ZADD', K.trainers, now(), ARGV[1])
call('ZREMRANGEBYRANK', K.trainers, 0, -65)
call('HSET', K.meta, 'trainer', ARGV[1], 'trainer_name', ARGV[2])
return 1
