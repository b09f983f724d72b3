#!lua flags=allow-oom
-- A person pauses or resumes the run. ARGV: 1|0.
call('HSET', K.meta, 'user_paused', ARGV[1])
return 1
