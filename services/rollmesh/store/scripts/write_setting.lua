#!lua flags=allow-oom
-- Changes a setting of the run. ARGV: name, value. Returns the number of the setting.
return new_setting(ARGV[1], ARGV[2])
