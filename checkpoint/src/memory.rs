//! How much memory this machine has.

/// Bytes of a line of `/proc/meminfo`, where the system has that: `MemTotal`, all there is;
/// `MemAvailable`, what programs can have.
pub fn memory(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|it| it.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
