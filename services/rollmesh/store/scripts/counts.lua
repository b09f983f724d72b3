#!lua flags=no-writes,allow-oom
-- uses: core
-- Returns the size of every state, totals, drops and memory.
local memory = call('INFO', 'memory')
return {
  call('HGETALL', K.counts), call('HGETALL', K.drops), call('ZCARD', K.pending), call('ZCARD', K.partial),
  call('ZCARD', K.scoring), call('ZCARD', K.open), call('ZCARD', K.ready), call('HLEN', K.cut),
  call('ZCARD', K.sessions), call('ZCARD', K.letters), tonumber(string.match(memory, 'used_memory:(%d+)')),
  tonumber(string.match(memory, '\nmaxmemory:(%d+)')), call('HGETALL', K.lengths),
}
