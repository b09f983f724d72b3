#!lua flags=no-writes,allow-oom
-- Returns a map: the size of every state, totals, drops and memory.
local memory = call('INFO', 'memory')
return {map = {
  counters = call('HGETALL', K.counts), drops = call('HGETALL', K.drops), lengths = call('HGETALL', K.lengths),
  pending = call('ZCARD', K.pending), partial = call('ZCARD', K.partial),
  resting = call('ZCARD', K.resting), oldest_rest = call('ZRANGE', K.resting, 0, 0, 'WITHSCORES')[2] or '',
  scoring = call('ZCARD', K.scoring),
  open = call('ZCARD', K.open), ready = call('ZCARD', K.ready), cut = call('HLEN', K.cut), aside = call('ZCARD', K.aside),
  sessions = call('ZCARD', K.sessions), letters = call('ZCARD', K.letters),
  used_memory = tonumber(string.match(memory, 'used_memory:(%d+)')),
  max_memory = tonumber(string.match(memory, '\nmaxmemory:(%d+)')),
}}
