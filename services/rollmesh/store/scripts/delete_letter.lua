#!lua flags=allow-oom
-- Forgets a dead letter and its payload. ARGV: trajectory id.
return forget_letter(ARGV[1])
