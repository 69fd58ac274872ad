//! One item: a zip archive as `torch.save` makes it.
//!
//! ```text
//! head  archive/data.pkl    what it is: dtype, sizes, strides
//!       archive/byteorder   little
//!       archive/version     3
//!       archive/data/0      header only
//! data                      the elements, row-major, at a multiple of 64 bytes
//! tail                      central directory, with the checksum of each record
//! ```
//!
//! All records are stored, not compressed. [`tensor_item_len`] is exact before any data exist, so every
//! byte of a file has its place ahead of time, and data is written without a copy. An item is a multiple
//! of 64 bytes long, which keeps the data of those behind it aligned.

mod zip;

use smallvec::SmallVec;

use crate::dtype::StoredType;
use crate::error::Broken;
use crate::pickle::read::{Global, Item, Kind, Pickle};
use crate::pickle::write::Writer;
use crate::pickle::{self, Value};

pub use zip::{Archive, Record};

/// Where data starts is a multiple of this, from the start of an item; so is its length.
pub const ALIGN: u64 = 64;

/// A tensor in an item.
#[derive(Debug, Clone)]
pub struct TensorItem<'a> {
    /// Its element type.
    pub dtype: StoredType,
    /// Its sizes.
    pub sizes: SmallVec<[u64; 4]>,
    /// Elements from one index to the next, in each dim.
    pub strides: SmallVec<[u64; 4]>,
    /// Where in the record element 0 is, in elements.
    pub start: u64,
    /// Whether bytes of an element are most significant first.
    pub big_endian: bool,
    /// The record of its elements; each of them is within.
    pub record: Record<'a>,
}

/// Bytes of the item of a tensor.
///
/// # Panics
/// If the tensor has 2^63 bytes or more.
pub fn tensor_item_len(dtype: StoredType, sizes: &[u64]) -> u64 {
    let (head, tail) = tensor_item(dtype, sizes, 0);
    head.len() as u64 + data_len(dtype, sizes) + tail.len() as u64
}

/// What stands before and after the data of a tensor that is stored row-major. `crc32_of_data` does not
/// change their lengths.
///
/// # Panics
/// If the tensor has 2^63 bytes or more.
pub fn tensor_item(dtype: StoredType, sizes: &[u64], crc32_of_data: u32) -> (Vec<u8>, Vec<u8>) {
    let pickle = tensor_pickle(dtype, sizes);
    let mut writer = zip::Writer::default();
    for (name, bytes) in records(&pickle) {
        writer.record(name, bytes);
    }
    writer.external("archive/data/0", data_len(dtype, sizes), crc32_of_data)
}

/// The item of a Python object.
///
/// # Panics
/// For values that are only read; see [`pickle::write::Writer::value`].
pub fn object_item(value: &Value) -> Vec<u8> {
    let pickle = pickle::write::to_vec(value);
    let mut writer = zip::Writer::default();
    for (name, bytes) in records(&pickle) {
        writer.record(name, bytes);
    }
    writer.finish()
}

/// The records of every item.
fn records(pickle: &[u8]) -> [(&'static str, &[u8]); 3] {
    [
        ("archive/data.pkl", pickle),
        ("archive/byteorder", b"little"),
        // The version of the archive, which PyTorch insists on.
        ("archive/version", b"3\n"),
    ]
}

fn data_len(dtype: StoredType, sizes: &[u64]) -> u64 {
    let bytes = sizes.iter().try_fold(dtype.bytes(), |res, &it| res.checked_mul(it));
    bytes.filter(|&it| it < 1 << 63).expect("a tensor has less than 2^63 bytes")
}

/// `_rebuild_tensor_v2(storage, 0, sizes, strides, False, OrderedDict())`, or `v3` with the dtype behind
/// that, for types that no class of storage stands for.
fn tensor_pickle(dtype: StoredType, sizes: &[u64]) -> Vec<u8> {
    let mut strides: SmallVec<[u64; 4]> = SmallVec::from_elem(1, sizes.len());
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim] * sizes[dim].max(1);
    }
    let n_bytes = data_len(dtype, sizes);
    let mut out = Writer::default();
    let rebuild =
        if dtype.storage().is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
    out.global("torch._utils", rebuild);
    out.raw(b"((");
    out.text("storage");
    match dtype.storage() {
        Some(class) => out.global("torch", class),
        None => out.global("torch.storage", "UntypedStorage"),
    }
    out.text("0");
    out.text("cpu");
    out.int(if dtype.storage().is_some() { n_bytes / dtype.bytes() } else { n_bytes }.into());
    out.raw(b"tQ");
    out.int(0);
    out.ints(sizes);
    out.ints(&strides);
    out.bool(false);
    out.global("collections", "OrderedDict");
    out.raw(b")R");
    if dtype.storage().is_none() {
        out.global("torch", dtype.torch());
    }
    out.raw(b"tR");
    out.stop();
    out.out
}

/// Reads an item that holds a tensor.
///
/// # Errors
/// If it is no archive of `torch.save`, or holds something other than one plain tensor, or elements lie
/// beyond its data.
pub fn read_tensor(item: &[u8]) -> Result<TensorItem<'_>, Broken> {
    let archive = Archive::open(item)?;
    let record = archive.need("data.pkl")?;
    let inside = |it: Broken| it.moved(record.at);
    let pickle = pickle::read::read(record.bytes, Kind::Tensor).map_err(inside)?;
    let description = Description::of(&pickle).map_err(|why| Broken::at(0, why)).map_err(inside)?;
    let data = archive.need(&format!("data/{}", description.key))?;
    let Description { dtype, sizes, strides, start, storage_len, .. } = description;
    if storage_len != Some(data.bytes.len() as u64) {
        let why = format!(
            "its data is {} bytes, and the storage is {}",
            data.bytes.len(),
            storage_len.map_or("too large to exist".to_string(), |it| it.to_string())
        );
        return Err(Broken::at(0, why).moved(data.at));
    }
    let end = end(&sizes, &strides, start).and_then(|it| it.checked_mul(dtype.bytes()));
    if end.is_none_or(|it| it > data.bytes.len() as u64) {
        let why = format!(
            "sizes {:?} with strides {:?} from element {start} reach beyond its {} bytes of data",
            &sizes[..],
            &strides[..],
            data.bytes.len()
        );
        return Err(Broken::at(0, why).moved(record.at));
    }
    let big_endian = match archive.find("byteorder").map(|it| it.bytes) {
        None | Some(b"little") => false,
        Some(b"big") => true,
        Some(_) => return Err(Broken::at(0, "its byte order is neither little nor big")),
    };
    Ok(TensorItem { dtype, sizes, strides, start, big_endian, record: data })
}

/// Reads an item that holds a Python object.
///
/// # Errors
/// If it is no archive of `torch.save`, or its pickle names a global that is not on the list.
pub fn read_object(item: &[u8]) -> Result<Value, Broken> {
    let archive = Archive::open(item)?;
    let record = archive.need("data.pkl")?;
    pickle::read::read(record.bytes, Kind::Object)
        .and_then(|it| it.value())
        .map_err(|it| it.moved(record.at))
}

/// Elements up to the end of the last one; `None` if that overflows.
fn end(sizes: &[u64], strides: &[u64], start: u64) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    let mut last = start;
    for (&size, &stride) in sizes.iter().zip(strides) {
        last = last.checked_add((size - 1).checked_mul(stride)?)?;
    }
    last.checked_add(1)
}

/// What `data.pkl` says of a tensor.
struct Description<'a> {
    dtype: StoredType,
    key: &'a str,
    /// Bytes; `None` if they overflow.
    storage_len: Option<u64>,
    start: u64,
    sizes: SmallVec<[u64; 4]>,
    strides: SmallVec<[u64; 4]>,
}

impl<'a> Description<'a> {
    fn of(pickle: &Pickle<'a>) -> Result<Description<'a>, String> {
        let call = pickle.object(pickle.root()).ok_or("it holds no tensor")?;
        let args = pickle.tuple(call.args).unwrap_or_default();
        let (args, dtype) = match (call.global, args) {
            (Global::RebuildV2, [args @ .., _hooks]) if args.len() == 5 => (args, None),
            (Global::RebuildV3, [args @ .., _hooks, Item::Global(Global::Dtype(dtype))])
                if args.len() == 5 =>
            {
                (args, Some(*dtype))
            }
            (Global::RebuildV2 | Global::RebuildV3, [.., Item::Dict(_)]) if args.len() > 6 => {
                return Err("a tensor with flags (a lazy conjugate or negative) is not read".into());
            }
            _ => return Err("it holds something other than one plain tensor".into()),
        };
        let unsigned = |it: Item| match it {
            Item::Int(it) => u64::try_from(it).ok(),
            _ => None,
        };
        let storage = pickle.persistent(args[0]).and_then(|it| pickle.tuple(it));
        let Some(&[kind, class, key, _device, numel]) = storage else {
            return Err("its storage is not described by five values".into());
        };
        let (of_storage, unit) = match class {
            Item::Global(Global::Storage(it)) => (Some(it), it.bytes()),
            Item::Global(Global::UntypedStorage) => (None, 1),
            _ => return Err("its storage has no class".into()),
        };
        let (Some("storage"), Some(key), Some(numel)) =
            (pickle.str(kind), pickle.str(key), unsigned(numel))
        else {
            return Err(
                "its storage is not described by kind, class, key, device and length".into()
            );
        };
        let (Some(start), Some(sizes), Some(strides)) =
            (unsigned(args[1]), pickle.sizes(args[2]), pickle.sizes(args[3]))
        else {
            return Err("its start, sizes or strides are no unsigned integers".into());
        };
        let strides: SmallVec<[u64; 4]> = strides;
        let res = Description {
            dtype: dtype.or(of_storage).ok_or("bytes without a dtype")?,
            key,
            storage_len: numel.checked_mul(unit),
            start,
            sizes,
            strides,
        };
        match res.sizes.len() == res.strides.len() {
            true => Ok(res),
            false => Err("it has as many sizes as strides".replace("as many", "not as many")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(dtype: StoredType, sizes: &[u64], data: &[u8]) -> Vec<u8> {
        let (head, tail) = tensor_item(dtype, sizes, crate::sums::crc32(data));
        [&head, data, &tail].concat()
    }

    #[test]
    fn items_of_every_type_are_read_as_written() {
        for dtype in StoredType::all() {
            for sizes in [&[][..], &[0], &[3], &[2, 0, 5], &[2, 3], &[1, 2, 1, 300, 1]] {
                let n: u64 = sizes.iter().product();
                let data: Vec<u8> = (0..n * dtype.bytes()).map(|it| it as u8).collect();
                let item = item(dtype, sizes, &data);
                assert_eq!(item.len() as u64, tensor_item_len(dtype, sizes));
                assert_eq!(item.len() as u64 % ALIGN, 0);
                let tensor = read_tensor(&item).unwrap();
                assert_eq!((tensor.dtype, &tensor.sizes[..]), (dtype, sizes));
                assert_eq!((tensor.start, tensor.record.bytes), (0, &data[..]));
                assert_eq!(tensor.record.at % ALIGN, 0);
                assert_eq!(tensor.record.crc32, crate::sums::crc32(&data));
            }
        }
    }

    /// Records of 4 GiB and more need other headers, whose lengths must add up too.
    #[test]
    fn large_items_have_the_length_that_was_foretold() {
        let sizes = [1 << 16, 1 << 15];
        let (head, tail) = tensor_item(StoredType::F32, &sizes, 7);
        let data_len = 4u64 << 31;
        let len = tensor_item_len(StoredType::F32, &sizes);
        assert_eq!((head.len() as u64 % ALIGN, len % ALIGN), (0, 0));
        assert_eq!(len, head.len() as u64 + data_len + tail.len() as u64);
        let directory = data_len + head.len() as u64;
        let end = &tail[tail.len() - 98..];
        assert_eq!(end[48..56], directory.to_le_bytes());
    }

    #[test]
    fn objects_are_read_as_written() {
        let text = |it: &str| Value::Str(it.to_string());
        let ints = [0, 255, 256, 65536, -1, i128::from(i32::MIN), 1 << 31, 1 << 63, i128::MIN];
        let value = Value::Dict(vec![
            (text("betas"), Value::Tuple(vec![Value::Float(0.9), Value::Float(0.95)])),
            (text("fused"), Value::None),
            (text("flags"), Value::Tuple(vec![Value::Bool(true), Value::Bool(false)])),
            (text("ints"), Value::List(ints.map(Value::Int).to_vec())),
            (text("many"), Value::List(vec![Value::Int(1); 2500])),
            (text("none"), Value::Tuple(Vec::new())),
            (text("five"), Value::Tuple(vec![text("ü"); 5])),
        ]);
        let item = object_item(&value);
        assert_eq!(item.len() as u64 % ALIGN, 0);
        assert_eq!(read_object(&item).unwrap(), value);
    }
}
