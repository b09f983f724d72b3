#!lua flags=allow-oom
-- Forgets a dead letter and its payload. ARGV: trajectory id.
local links = call('HGET', letter_key(ARGV[1]), 'links')
for name in string.gmatch(links or '', '%S+') do call('UNLINK', chunk_key(ARGV[1] .. ':' .. name)) end
call('UNLINK', letter_key(ARGV[1]), letter_segments_key(ARGV[1]), letter_prompt_key(ARGV[1]))
return call('ZREM', K.letters, ARGV[1])
