-- Sessions of agents. `a:<id>` names the worker session that has a session, the address of its process and a trajectory;
-- `a:<name>` has the id of the session that an agent opened under this name. Both are kept long enough after their last
-- turn that a repeated reward still reaches the process that recorded it.
local KEPT_MS = 24 * 3600 * 1000

-- Tells whether a trajectory of the session is held, or waits for its next lease.
local function agent_lives(id)
  local trajectory = call('HGET', agent_key(id), 'trajectory')
  if not trajectory then return false end
  local v = call('HMGET', trajectory_key(trajectory), 'agent', 'state')
  return v[1] == id and (v[2] == S.leased or v[2] == S.partial or v[2] == S.resting)
end

local function own_agent(session, id, trajectory)
  call('HSET', agent_key(id), 'worker', session, 'address', call('HGET', session_key(session), 'address') or '',
    'trajectory', trajectory)
  call('PEXPIRE', agent_key(id), KEPT_MS)
end

-- Saves the mark of an agent's session in a trajectory that the worker session holds.
local function keep_agent(session, trajectory, mark, id, name)
  if name ~= '' then
    call('HSET', agent_key(name), 'id', id)
    call('PEXPIRE', agent_key(name), KEPT_MS)
  end
  own_agent(session, id, trajectory)
  call('HSET', trajectory_key(trajectory), 'agent', id, 'snapshot', mark, 'has_snapshot', 1)
end
