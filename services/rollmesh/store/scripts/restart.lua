#!lua flags=allow-oom
-- Drops the saved tokens of held, unfinished trajectories, which restart as the next incarnation. ARGV: session, ids.
-- Returns the incarnation per id, -1 for an id that is not held; a retry finds no tokens and changes nothing.
local restarted, reply = 0, {}
for at = 2, #ARGV do
  local id = ARGV[at]
  local v = call('HMGET', trajectory_key(id), 'session', 'state', 'tokens', 'links', 'incarnation')
  local held, incarnation = v[1] == ARGV[1] and v[2] == S.leased, tonumber(v[5] or '0')
  if held and tonumber(v[3]) > 0 then
    incarnation = incarnation + 1
    local fields = {}
    for _, field in ipairs(call('HKEYS', trajectory_key(id))) do
      if string.match(field, '^[cd]%d+$') then fields[#fields + 1] = field end
    end
    call('HDEL', trajectory_key(id), 'links', 'step', 'snapshot', 'has_snapshot', 'version', 'generator')
    in_slices(fields, function(...) call('HDEL', trajectory_key(id), ...) end)
    local keys = {}
    payload_keys(id, v[4], keys)
    unlink(keys)
    -- Not a number of tokens, so that the next lease finds no progress, regardless of the tokens saved by then.
    call('HSET', trajectory_key(id), 'tokens', 0, 'mark', '-', 'incarnation', incarnation)
    recompute_step(load_group(group_of(id)), id)
    count('restarted_tokens_total', tonumber(v[3]))
    restarted = restarted + 1
  end
  reply[#reply + 1] = held and incarnation or -1
end
count('restarts_total', restarted)
flush_counts()
return reply
