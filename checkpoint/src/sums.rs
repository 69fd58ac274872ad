//! Checksums of items, beside the file that holds them: `__0_0.distcp.sums` for `__0_0.distcp`.
//!
//! PyTorch ignores the file. One line of JSON for each item:
//!
//! ```text
//! {"save":"step-2.c0ffee00"}
//! {"key":"model.w","offsets":[3,0],"at":1577,"len":1577,"crc32":"0a1b2c3d"}
//! {"key":"optim.param_groups.0.lr","at":3154,"len":704,"crc32":"4e5f6071"}
//! ```
//!
//! The first line, which files of earlier versions lack, is the save that the file is of; the index has the
//! same. The sum is over all bytes of the item, headers too, and the line says what the item is, so that files
//! that were swapped are found as well as bits that were flipped.

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
}

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

/// CRC-32 of an item, of whose data it is known already; `head` and `tail` are those of
/// [`crate::archive::tensor_item`].
pub fn crc32_of_item(head: &[u8], data_len: u64, crc32_of_data: u32, tail: &[u8]) -> u32 {
    let mut res = Hasher::new();
    res.update(head);
    res.combine(&Hasher::new_with_initial_len(crc32_of_data, data_len));
    res.update(tail);
    res.finalize()
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
            let sum = serde_json::from_slice(line)
                .map_err(|it| Broken::at(at, format!("not the line of a checksum: {it}")))?;
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
        let text = String::deserialize(deserializer)?;
        match text.len() {
            8 => u32::from_str_radix(&text, 16).map_err(D::Error::custom),
            _ => Err(D::Error::custom("a checksum has eight hexadecimal digits")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_written() {
        let sums = [
            Sum { key: "a\"b".into(), offsets: Some(vec![3, 0]), at: 1 << 40, len: 9, crc32: 1 },
            Sum { key: "lr".into(), offsets: None, at: 0, len: 7, crc32: 0xffff_ffff },
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
    }

    /// The check value of CRC-32/ISO-HDLC.
    #[test]
    fn parts_have_the_sum_of_the_whole() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32_of_item(b"12", 4, crc32(b"3456"), b"789"), 0xcbf4_3926);
    }
}
