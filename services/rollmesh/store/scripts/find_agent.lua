#!lua flags=no-writes,allow-oom
-- Finds the process that has a session of an agent. ARGV: id or name of the session.
-- Returns its address, and 1 while a trajectory of the session is held or waits for its next lease; nothing for an
-- unknown session.
local id = call('HGET', agent_key(ARGV[1]), 'id') or ARGV[1]
local address = call('HGET', agent_key(id), 'address')
return address and {address, agent_lives(id) and 1 or 0} or {}
