#!lua flags=allow-oom
-- Records the content behind a setting (rows, tokenizer) once, and returns what is recorded. Nothing depends on it before
-- the first prompt and the first evaluation: until then another content replaces it.
-- ARGV: setting, content in words, prompts of an epoch ('' for other settings than data.source).
local name = 'content:' .. ARGV[1]
local meta = call('HMGET', K.meta, name, 'cursor_epoch', 'cursor_index')
local begun = meta[2] ~= '0' or meta[3] ~= '0' or call('EXISTS', K.evaluations) == 1
if meta[1] and begun then return meta[1] end
call('HSET', K.meta, name, ARGV[2])
if ARGV[3] ~= '' then call('HSET', K.meta, 'epoch_size', ARGV[3]) end
return ARGV[2]
