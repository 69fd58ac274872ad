//! Zip archives, as far as `torch.save` uses them: stored records, no encryption, one disk; with the
//! 64-bit extension. Formats and numbers are those of PKWARE's APPNOTE 6.3.10.

use crate::error::Broken;
use crate::sums::crc32;

use super::ALIGN;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const LOCATOR_64: u32 = 0x0706_4b50;

/// Bytes of an end of a central directory without a comment, and of the two headers of the 64-bit
/// extension before it.
const END_LEN: usize = 22;
const ENDS_LEN: usize = 56 + 20 + END_LEN;

/// Sizes from which on a field of 32 bits says "see the 64-bit extension".
const WIDE: u64 = u32::MAX as u64;

/// The id of an extra field that only fills up, as PyTorch uses it.
const PADDING: &[u8] = b"FB";

/// One record of an archive.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Where its bytes start, from the start of the archive.
    pub at: u64,
    /// Its bytes.
    pub bytes: &'a [u8],
    /// The checksum that is stored with them.
    pub crc32: u32,
}

impl Record<'_> {
    /// Whether the checksum is that of the bytes.
    pub fn is_whole(&self) -> bool {
        crc32(self.bytes) == self.crc32
    }
}

/// An archive in memory.
#[derive(Debug)]
pub struct Archive<'a> {
    bytes: &'a [u8],
    records: Vec<(&'a [u8], Record<'a>)>,
}

impl<'a> Archive<'a> {
    /// Reads the central directory; bytes after the archive are ignored.
    pub fn open(bytes: &'a [u8]) -> Result<Archive<'a>, Broken> {
        let (n, mut at) = directory(bytes)?;
        let mut records = Vec::new();
        for _ in 0..n {
            let (name, record, next) = entry(bytes, at)?;
            records.push((name, record));
            at = next;
        }
        Ok(Archive { bytes, records })
    }

    /// A record by its name below the folder that all are in.
    pub fn find(&self, name: &str) -> Option<Record<'a>> {
        let below = |it: &'a [u8]| it.iter().position(|&it| it == b'/').map(|at| &it[at + 1..]);
        self.records.iter().find(|it| below(it.0) == Some(name.as_bytes())).map(|it| it.1)
    }

    /// A record that must be there.
    pub fn need(&self, name: &str) -> Result<Record<'a>, Broken> {
        let missing = || Broken::at(self.bytes.len(), format!("the archive has no `{name}`"));
        self.find(name).ok_or_else(missing)
    }

    /// Every record, with its name.
    pub fn records(&self) -> impl Iterator<Item = (String, Record<'a>)> {
        self.records.iter().map(|it| (String::from_utf8_lossy(it.0).into_owned(), it.1))
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?).into())
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?).into())
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn is(bytes: &[u8], at: usize, signature: u32) -> bool {
    u32_at(bytes, at) == Some(signature.into())
}

/// Entries of the central directory, and where it starts.
fn directory(bytes: &[u8]) -> Result<(u64, usize), Broken> {
    if !is(bytes, 0, LOCAL) {
        return Err(Broken::at(0, "this is not the start of an item (a zip archive)"));
    }
    // A comment, or what is tolerated behind the archive, may follow the end; 64 KiB at most.
    let first = bytes.len().saturating_sub(END_LEN + 0xffff);
    let end = (first..bytes.len().saturating_sub(END_LEN - 1)).rev().find(|&at| is(bytes, at, END));
    let Some(end) = end else {
        return Err(Broken::at(bytes.len(), "the archive has no end: the item is cut off"));
    };
    let narrow = || Some((u16_at(bytes, end + 10)?, u32_at(bytes, end + 16)?));
    let wide = || {
        let locator = end.checked_sub(20).filter(|&at| is(bytes, at, LOCATOR_64))?;
        let at = usize::try_from(u64_at(bytes, locator + 8)?).ok()?;
        // Far below `usize::MAX` if the signature is there.
        is(bytes, at, END_64).then_some(())?;
        Some((u64_at(bytes, at + 32)?, u64_at(bytes, at + 48)?))
    };
    let found = wide().or_else(narrow);
    match found.and_then(|(n, at)| Some((n, usize::try_from(at).ok()?))) {
        Some((n, at)) if at <= end => Ok((n, at)),
        _ => Err(Broken::at(end, "the archive's directory is beyond its end")),
    }
}

/// A record by its entry in the central directory, and where the next entry is.
fn entry(bytes: &[u8], at: usize) -> Result<(&[u8], Record<'_>, usize), Broken> {
    if !is(bytes, at, CENTRAL) {
        return Err(Broken::at(at, "this is no entry of the archive's directory"));
    }
    let short = || Broken::at(at, "an entry of the archive's directory is cut off");
    let field = |offset: usize| u32_at(bytes, at + offset).ok_or_else(short);
    let [name_len, extra_len, comment_len] = [28, 30, 32].map(|it| u16_at(bytes, at + it));
    let (Some(name_len), Some(extra_len), Some(comment_len)) = (name_len, extra_len, comment_len)
    else {
        return Err(short());
    };
    let name_at = at + 46;
    let extra_at = name_at + name_len as usize;
    let name = bytes.get(name_at..extra_at).ok_or_else(short)?;
    let extra = bytes.get(extra_at..extra_at + extra_len as usize).ok_or_else(short)?;
    let next = extra_at + (extra_len + comment_len) as usize;

    // In this order, and each only if its field of 32 bits is full.
    let mut wide = wide_fields(extra);
    let mut value = |narrow: u64| match narrow {
        WIDE => wide.next().ok_or_else(short),
        it => Ok(it),
    };
    let size = value(field(24)?)?;
    let stored = value(field(20)?)?;
    let header = value(field(42)?)?;
    if u16_at(bytes, at + 10) != Some(0) || size != stored {
        let name = String::from_utf8_lossy(name);
        return Err(Broken::at(at, format!("`{name}` is compressed, and items are not")));
    }
    let data = (|| {
        let header = usize::try_from(header).ok().filter(|&it| is(bytes, it, LOCAL))?;
        let names = u16_at(bytes, header + 26)? + u16_at(bytes, header + 28)?;
        let start = header + 30 + names as usize;
        let end = start.checked_add(usize::try_from(size).ok()?)?;
        Some((start, bytes.get(start..end)?))
    })();
    let Some((start, data)) = data else {
        let name = String::from_utf8_lossy(name);
        return Err(Broken::at(at, format!("`{name}` is not where the archive's directory says")));
    };
    Ok((name, Record { at: start as u64, bytes: data, crc32: field(16)? as u32 }, next))
}

/// The fields of the 64-bit extension among extra fields.
fn wide_fields(extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut rest = extra;
    let mut found: &[u8] = &[];
    while let (Some(id), Some(len)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let Some(body) = rest.get(4..4 + len as usize) else { break };
        if id == 1 {
            found = body;
        }
        rest = &rest[4 + len as usize..];
    }
    found.as_chunks().0.iter().map(|&it| u64::from_le_bytes(it))
}

/// Makes an archive, record by record.
#[derive(Debug, Default)]
pub struct Writer {
    out: Vec<u8>,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    name: &'static str,
    header: u64,
    len: u64,
    crc32: u32,
}

impl Writer {
    /// Adds a record.
    pub fn record(&mut self, name: &'static str, bytes: &[u8]) {
        self.header(name, bytes.len() as u64, crc32(bytes));
        self.out.extend_from_slice(bytes);
    }

    /// Ends the archive.
    pub fn finish(mut self) -> Vec<u8> {
        let tail = self.tail(self.out.len() as u64);
        self.out.extend_from_slice(&tail);
        self.out
    }

    /// Ends the archive with a record whose bytes are not here: what comes before and after them.
    pub fn external(mut self, name: &'static str, len: u64, crc32: u32) -> (Vec<u8>, Vec<u8>) {
        self.header(name, len, crc32);
        let tail = self.tail(self.out.len() as u64 + len);
        (self.out, tail)
    }

    /// The header before a record, which puts the record at a multiple of [`ALIGN`].
    fn header(&mut self, name: &'static str, len: u64, crc32: u32) {
        let header = self.out.len() as u64;
        let wide: Vec<u8> = match len >= WIDE {
            true => [&[1, 0, 16, 0][..], &len.to_le_bytes(), &len.to_le_bytes()].concat(),
            false => Vec::new(),
        };
        let before = self.out.len() + 30 + name.len() + wide.len() + 4;
        let fill = before.next_multiple_of(ALIGN as usize) - before;
        put32(&mut self.out, LOCAL);
        // Version needed, flags (names are UTF-8), stored, no time, no date (1980-01-01).
        put16(&mut self.out, &[if wide.is_empty() { 20 } else { 45 }, 0x800, 0, 0, 0x21]);
        put32(&mut self.out, crc32);
        put32(&mut self.out, narrow(len));
        put32(&mut self.out, narrow(len));
        put16(&mut self.out, &[name.len() as u16, (wide.len() + 4 + fill) as u16]);
        self.out.extend_from_slice(name.as_bytes());
        self.out.extend_from_slice(&wide);
        put_padding(&mut self.out, fill);
        self.entries.push(Entry { name, header, len, crc32 });
    }

    /// The central directory, which starts at byte `start`, and what follows it. The last entry fills
    /// up, so that the archive ends at a multiple of [`ALIGN`].
    fn tail(&self, start: u64) -> Vec<u8> {
        let wide_len = |it: &Entry| if it.len >= WIDE { 20 } else { 0 };
        let plain: usize = self.entries.iter().map(|it| 46 + it.name.len() + wide_len(it)).sum();
        let before = start + (plain + 4 + ENDS_LEN) as u64;
        let fill = (before.next_multiple_of(ALIGN) - before) as usize;
        let mut out = Vec::with_capacity(plain + 4 + fill + ENDS_LEN);
        for (i, entry) in self.entries.iter().enumerate() {
            let padding = (i + 1 == self.entries.len()).then_some(fill);
            let extra = wide_len(entry) + padding.map_or(0, |it| it + 4);
            let version = if wide_len(entry) > 0 { 45 } else { 20 };
            put32(&mut out, CENTRAL);
            put16(&mut out, &[version, version, 0x800, 0, 0, 0x21]);
            put32(&mut out, entry.crc32);
            put32(&mut out, narrow(entry.len));
            put32(&mut out, narrow(entry.len));
            put16(&mut out, &[entry.name.len() as u16, extra as u16, 0, 0, 0]);
            put32(&mut out, 0);
            put32(&mut out, narrow(entry.header));
            out.extend_from_slice(entry.name.as_bytes());
            if entry.len >= WIDE {
                put16(&mut out, &[1, 16]);
                out.extend_from_slice(&entry.len.to_le_bytes());
                out.extend_from_slice(&entry.len.to_le_bytes());
            }
            if let Some(fill) = padding {
                put_padding(&mut out, fill);
            }
        }
        let (n, len) = (self.entries.len() as u64, out.len() as u64);
        put32(&mut out, END_64);
        out.extend_from_slice(&44u64.to_le_bytes());
        put16(&mut out, &[45, 45]);
        put32(&mut out, 0);
        put32(&mut out, 0);
        for it in [n, n, len, start] {
            out.extend_from_slice(&it.to_le_bytes());
        }
        put32(&mut out, LOCATOR_64);
        put32(&mut out, 0);
        out.extend_from_slice(&(start + len).to_le_bytes());
        put32(&mut out, 1);
        put32(&mut out, END);
        put16(&mut out, &[0, 0, n as u16, n as u16]);
        put32(&mut out, narrow(len));
        put32(&mut out, narrow(start));
        put16(&mut out, &[0]);
        out
    }
}

fn put16(out: &mut Vec<u8>, fields: &[u16]) {
    out.extend(fields.iter().flat_map(|it| it.to_le_bytes()));
}

fn put32(out: &mut Vec<u8>, it: u32) {
    out.extend_from_slice(&it.to_le_bytes());
}

fn put_padding(out: &mut Vec<u8>, fill: usize) {
    out.extend_from_slice(PADDING);
    put16(out, &[fill as u16]);
    out.resize(out.len() + fill, b'Z');
}

/// A field of 32 bits, full if the value does not fit.
fn narrow(it: u64) -> u32 {
    u32::try_from(it).unwrap_or(u32::MAX)
}
