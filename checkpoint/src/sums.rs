//! Checksums of items, beside the file that holds them: `__0_0.distcp.sums` for `__0_0.distcp`.
//!
//! PyTorch ignores the file. One line of JSON for each item:
//!
//! ```text
//! {"save":"step-2.c0ffee00"}
//! {"key":"model.w","offsets":[3,0],"at":1577,"len":1577,"crc32":"0a1b2c3d"}
//! {"key":"optim.param_groups.0.lr","at":3154,"len":704,"crc32":"4e5f6071"}
//! {"key":"model.v","offsets":[0],"at":3858,"len":2000000,"crc32":"..","pieces":["..",".."]}
//! ```
//!
//! The first line, which files of earlier versions lack, is the save that the file is of; the index has the
//! same. The sum is over all bytes of the item, headers too, and the line says what the item is, so that files
//! that were swapped are found as well as bits that were flipped. An item of more than [`PIECE`] bytes also has a
//! checksum for each piece of so many: whoever reads a part of it checks what it reads, and little more. Files of
//! earlier versions lack pieces.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};

use crate::error::Broken;
use crate::map::open_regular;

/// The checksum of one item.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    /// The key of its tensor or object; of the first one, if several are stored here.
    pub key: String,
    /// The first element of its box; none for an object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offsets: Option<Vec<u64>>,
    /// First byte in the file.
    pub at: u64,
    /// How many bytes.
    pub len: u64,
    /// CRC-32 (IEEE 802.3, as in zip) of these bytes.
    #[serde(with = "hex")]
    pub crc32: u32,
    /// CRC-32 of each [`PIECE`] of them; none if there is one piece.
    #[serde(with = "hex_list", default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<u32>,
}

/// The bytes of an item that have a checksum of their own; the last piece may have fewer.
pub const PIECE: u64 = 1 << 20;

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    save: String,
}

/// `__0_0.distcp` -> `__0_0.distcp.sums`.
pub fn file_name(data: &str) -> String {
    format!("{data}.sums")
}

/// CRC-32 of some bytes.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

impl Sum {
    /// The bytes, counted from the first of the item, that have one checksum, and that checksum. `piece` is below
    /// the result of [`Sum::n_pieces`].
    pub(crate) fn piece(&self, piece: u64) -> (std::ops::Range<u64>, u32) {
        match self.pieces.get(piece as usize) {
            Some(&it) => (piece * PIECE..self.len.min((piece + 1) * PIECE), it),
            None => (0..self.len, self.crc32),
        }
    }

    /// The number of checksums that cover the item.
    pub(crate) fn n_pieces(&self) -> u64 {
        self.pieces.len().max(1) as u64
    }

    /// Returns true if the checksums of the pieces make up that of the item.
    pub(crate) fn is_consistent(&self) -> bool {
        let piece = |it: u64| {
            let (bytes, crc32) = self.piece(it);
            (crc32, bytes.end - bytes.start)
        };
        joined((0..self.n_pieces()).map(piece)) == self.crc32
    }
}

/// CRC-32 of parts that lie one behind the other, each with its checksum and its bytes.
fn joined(parts: impl IntoIterator<Item = (u32, u64)>) -> u32 {
    let mut res = Hasher::new();
    for (crc32, len) in parts {
        res.combine(&Hasher::new_with_initial_len(crc32, len));
    }
    res.finalize()
}

/// Makes all checksums of an item in one pass over its elements, before its head is known.
#[derive(Debug)]
pub struct Summing {
    head: u64,
    /// Checksums and lengths of the pieces, the first without the head.
    pieces: Vec<(u32, u64)>,
    current: Hasher,
    /// The bytes of the current piece so far.
    len: u64,
    /// The bytes that the current piece still takes.
    room: u64,
}

impl Summing {
    /// Starts an item whose elements come behind `head` bytes.
    ///
    /// # Panics
    /// If the head is as long as a piece.
    pub fn new(head: u64) -> Summing {
        assert!(head < PIECE, "a head has a few hundred bytes");
        Summing { head, pieces: Vec::new(), current: Hasher::new(), len: 0, room: PIECE - head }
    }

    /// Adds the bytes that come next.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (these, rest) = bytes.split_at(bytes.len().min(self.room as usize));
            self.current.update(these);
            self.len += these.len() as u64;
            self.room -= these.len() as u64;
            if self.room == 0 {
                let done = std::mem::take(&mut self.current);
                self.pieces.push((done.finalize(), self.len));
                (self.len, self.room) = (0, PIECE);
            }
            bytes = rest;
        }
    }

    /// CRC-32 of all bytes so far.
    pub fn crc32(&self) -> u32 {
        let current = (self.current.clone().finalize(), self.len);
        joined(self.pieces.iter().copied().chain([current]))
    }

    /// Ends an item that had this head. Returns the checksum of the item, and those of its pieces if it has several.
    pub fn finish(mut self, head: &[u8]) -> (u32, Vec<u32>) {
        assert_eq!(head.len() as u64, self.head, "the head is as long as was said");
        if self.len > 0 || self.pieces.is_empty() {
            self.pieces.push((self.current.finalize(), self.len));
        }
        let first = &mut self.pieces[0];
        let with_head = joined([(crc32(head), self.head), *first]);
        *first = (with_head, self.head + first.1);
        let whole = joined(self.pieces.iter().copied());
        let several = self.pieces.len() > 1;
        (whole, if several { self.pieces.iter().map(|it| it.0).collect() } else { Vec::new() })
    }
}

/// Writes the first line, that a file is of this save.
pub fn write_head(save: &str, mut out: impl io::Write) -> io::Result<()> {
    serde_json::to_writer(&mut out, &Head { save: save.to_string() })?;
    out.write_all(b"\n")
}

/// The save that a file of checksums is of; `None` if it does not say, or is not there.
///
/// # Errors
/// If it cannot be read.
pub fn save_of(path: &Path) -> io::Result<Option<String>> {
    let file = match open_regular(path) {
        Err(it) if it.kind() == io::ErrorKind::NotFound => return Ok(None),
        it => it?,
    };
    let mut line = Vec::new();
    // No first line is longer: what is, is something else.
    BufReader::with_capacity(256, file.take(256)).read_until(b'\n', &mut line)?;
    Ok(serde_json::from_slice(&line).ok().map(|it: Head| it.save))
}

/// Writes the lines of one file.
pub fn write(sums: &[Sum], mut out: impl io::Write) -> io::Result<()> {
    let mut text = Vec::new();
    for sum in sums {
        serde_json::to_writer(&mut text, sum)?;
        text.push(b'\n');
    }
    out.write_all(&text)
}

/// Reads the lines of one file.
pub fn read(text: &[u8]) -> Result<Vec<Sum>, Broken> {
    let mut res = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive(|&it| it == b'\n') {
        if line.last() != Some(&b'\n') {
            return Err(Broken::at(at, "the last line is not whole"));
        }
        if at > 0 || serde_json::from_slice::<Head>(line).is_err() {
            let sum: Sum = serde_json::from_slice(line)
                .map_err(|it| Broken::at(at, format!("not the line of a checksum: {it}")))?;
            let n = sum.pieces.len() as u64;
            if n > 0 && n != sum.len.div_ceil(PIECE) {
                let why = format!("{n} checksums are not those of an item of {} bytes", sum.len);
                return Err(Broken::at(at, why));
            }
            res.push(sum);
        }
        at += line.len();
    }
    Ok(res)
}

/// A checksum as eight hexadecimal digits.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(it: &u32, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{it:08x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
        parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }

    pub fn parse(text: &str) -> Result<u32, String> {
        match text.len() {
            8 => u32::from_str_radix(text, 16).map_err(|it| it.to_string()),
            _ => Err("a checksum has eight hexadecimal digits".into()),
        }
    }
}

/// Checksums as a list of eight hexadecimal digits each.
mod hex_list {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(it: &[u32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(it.iter().map(|it| format!("{it:08x}")))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts
            .iter()
            .map(|it| super::hex::parse(it))
            .collect::<Result<_, _>>()
            .map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_written() {
        let sum = |key: &str, offsets: Option<Vec<u64>>, at, len, crc32, pieces| Sum {
            key: key.into(),
            offsets,
            at,
            len,
            crc32,
            pieces,
        };
        let sums = [
            sum("a\"b", Some(vec![3, 0]), 1 << 40, 9, 1, vec![]),
            sum("lr", None, 0, PIECE + 1, 0xffff_ffff, vec![7, 8]),
        ];
        let mut text = Vec::new();
        write(&sums, &mut text).unwrap();
        assert_eq!(read(&text).unwrap(), sums);
        let mut headed = Vec::new();
        write_head("step-2.c0ffee00", &mut headed).unwrap();
        headed.extend_from_slice(&text);
        assert_eq!(read(&headed).unwrap(), sums);
        assert!(read(&text[..text.len() - 1]).is_err());
        assert!(read(b"{\"key\":\"a\"}\n").is_err());
        let mut short = Vec::new();
        write(&[sum("lr", None, 0, PIECE + 1, 1, vec![7])], &mut short).unwrap();
        assert!(read(&short).unwrap_err().to_string().contains("1 checksums are not those of"));
    }

    /// The check value of CRC-32/ISO-HDLC; then items of one piece and of several, whose parts end anywhere.
    #[test]
    fn pieces_have_the_sums_of_their_bytes_however_they_come() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        let piece = PIECE as usize;
        for (head, data, tail, step) in [
            (2, 4, 3, 1),
            (0, 0, 9, 4),
            (300, piece - 300, 0, 70_000),
            (300, piece - 299, 5, piece),
            (64, 3 * piece - 100, 64, piece / 3),
            (1, 2 * piece - 1, 700, 1 << 24),
        ] {
            let bytes: Vec<u8> =
                (0..head + data + tail).map(|it| (it * 7 + it / 251) as u8).collect();
            let mut sums = Summing::new(head as u64);
            bytes[head..head + data].chunks(step).for_each(|it| sums.update(it));
            assert_eq!(sums.crc32(), crc32(&bytes[head..head + data]));
            sums.update(&bytes[head + data..]);
            let (whole, pieces) = sums.finish(&bytes[..head]);
            assert_eq!(whole, crc32(&bytes));
            let expect: Vec<u32> = bytes.chunks(piece).map(crc32).collect();
            let several = expect.len() > 1;
            assert_eq!(pieces, if several { expect } else { Vec::new() });
            let key = String::new();
            let len = bytes.len() as u64;
            let sum = Sum { key, offsets: None, at: 0, len, crc32: whole, pieces };
            assert!(sum.is_consistent());
            assert_eq!(Sum { crc32: whole ^ 1, ..sum }.is_consistent(), !several);
        }
    }
}
