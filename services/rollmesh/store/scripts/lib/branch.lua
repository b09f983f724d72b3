-- uses: core
-- Every train step publishes one policy. A second policy of the same step comes from a rollback: the versions before it
-- are an abandoned branch, and no trajectory may start on them.
local function add_policy(version, train_step, path, digest)
  local newest = call('HMGET', K.meta, 'policy_version', 'policy_train_step')
  if tonumber(newest[1]) >= 0 and tonumber(train_step) <= tonumber(newest[2]) then
    call('HSET', K.meta, 'branch_version', version)
  end
  call('XADD', K.policies, (tonumber(version) + 1) .. '-0', 'version', version, 'train_step', train_step,
    'path', path, 'digest', digest)
  call('HSET', K.versions, version, train_step)
  call('HSET', K.meta, 'policy_version', version, 'policy_train_step', train_step)
end
