#!lua flags=allow-oom
-- Announces a clean stop of the server, after its clients have stopped: its next start is not a recovery.
call('HSET', K.meta, 'clean', '1')
return 1
