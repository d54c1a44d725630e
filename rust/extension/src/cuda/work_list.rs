//! The work list of a kernel: segments, and the segment of each chunk, as `kernels/chunks.py` reads them.

use gradclip_core::dtype::DType;
use gradclip_core::plan::{DevicePlan, Segment};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Integers of one segment.
const FIELDS: usize = 10;

/// What one kernel walks: the segments of one device and element type, cut into chunks.
#[pyclass(frozen, module = "gradclip._core")]
pub struct WorkList {
    dtype: DType,
    segments: Vec<i64>,
    owners: Vec<i32>,
}

#[pymethods]
impl WorkList {
    /// The name of the element type.
    #[getter]
    pub fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Bytes of the list.
    #[getter]
    fn size(&self) -> usize {
        self.owners_offset() + size_of_val(self.owners.as_slice())
    }

    /// Whether another list is the same, byte for byte.
    pub fn same_as(&self, other: &WorkList) -> bool {
        self.dtype == other.dtype && self.segments == other.segments && self.owners == other.owners
    }

    /// Writes the list to host memory of `capacity` bytes at `address`.
    ///
    /// Raises `ValueError` where that is too little.
    fn write_to(&self, address: usize, capacity: usize) -> PyResult<()> {
        if address == 0 || capacity < self.size() {
            let size = self.size();
            return Err(PyValueError::new_err(format!("`capacity` is {capacity}; the list takes {size} bytes")));
        }
        let to = address as *mut u8;
        let (segments, owners) = (&self.segments, &self.owners);
        // SAFETY: the caller owns `capacity` bytes there, which were found enough for both parts.
        unsafe {
            to.copy_from_nonoverlapping(segments.as_ptr().cast(), self.owners_offset());
            to.add(self.owners_offset())
                .copy_from_nonoverlapping(owners.as_ptr().cast(), size_of_val(owners.as_slice()));
        }
        Ok(())
    }
}

/// The lists of a device's segments, one for each element type, in chunks of at most `chunk` elements; complex
/// elements as twice as many reals, if asked for.
///
/// Raises `ValueError` for more chunks than a list can number.
pub fn work_lists(segments: &[Segment], chunk: u64, reals: bool) -> PyResult<Vec<WorkList>> {
    let mut lists: Vec<WorkList> = Vec::new();
    for segment in segments {
        let segment = if reals { as_reals(segment) } else { *segment };
        let place = lists.iter().position(|list| list.dtype == segment.dtype).unwrap_or_else(|| {
            lists.push(WorkList { dtype: segment.dtype, segments: Vec::new(), owners: Vec::new() });
            lists.len() - 1
        });
        lists[place].push(&segment, chunk)?;
    }
    Ok(lists)
}

/// The lists for digests, of the tensors that `is_contiguous` names: one of 16-bit words, as bfloat16, and one of 32-bit
/// words, as float32. Words are counted along each tensor, whose segment is a single run.
///
/// Raises `ValueError` for more chunks than a list can number.
pub fn digest_lists(segments: &[Segment], chunk: u64, is_contiguous: impl Fn(u32) -> bool) -> PyResult<Vec<WorkList>> {
    let contiguous = segments.iter().filter(|segment| is_contiguous(segment.tensor));
    work_lists(&contiguous.map(as_words).collect::<Vec<_>>(), chunk, false)
}

/// Elements as words of at most 32 bits.
fn as_words(segment: &Segment) -> Segment {
    let mut words = *segment;
    let bytes = segment.dtype.bytes() as u64;
    words.dtype = if bytes == 2 { DType::Bf16 } else { DType::F32 };
    words.layout.row_length *= bytes.div_ceil(4);
    words.layout.row_stride *= bytes.div_ceil(4);
    words
}

/// Where sums or scales of a device are planned.
pub fn segments_of(plan: &DevicePlan, scales: bool) -> &[Segment] {
    if scales { &plan.scales } else { &plan.sums }
}

/// Complex elements as twice as many reals.
fn as_reals(segment: &Segment) -> Segment {
    let mut reals = *segment;
    reals.dtype = match segment.dtype {
        DType::C64 => DType::F32,
        DType::C128 => DType::F64,
        real => {
            return Segment { dtype: real, ..reals };
        }
    };
    reals.layout.row_length *= 2;
    reals.layout.row_stride *= 2;
    reals
}

impl WorkList {
    /// Number of chunks, which fits 32 bits.
    pub fn chunks(&self) -> i32 {
        self.owners.len() as i32
    }

    /// Bytes of the segments; the owners follow them.
    pub fn owners_offset(&self) -> usize {
        size_of_val(self.segments.as_slice())
    }

    fn push(&mut self, segment: &Segment, chunk: u64) -> PyResult<()> {
        let (layout, cut) = (segment.layout, segment.cut(chunk));
        let owner = i32::try_from(self.segments.len() / FIELDS);
        let last = i32::try_from(self.owners.len() as u64 + cut.count);
        let (Ok(owner), Ok(_)) = (owner, last) else {
            return Err(PyValueError::new_err("gradients have more than 2^31 chunks; clip them in several lists"));
        };
        let fields = [
            segment.address,
            layout.rows,
            layout.row_length,
            layout.row_stride,
            layout.weight,
            u64::from(segment.tensor),
            self.owners.len() as u64,
            cut.rows,
            cut.pieces,
            cut.row_length,
        ];
        self.segments.extend(fields.map(|field| field as i64));
        self.owners.resize(self.owners.len() + cut.count as usize, owner);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradclip_core::plan::{Descriptor, Device, Plan};

    fn planned(sizes: &[i64], strides: &[i64], dtype: DType) -> Plan {
        let descriptor = Descriptor {
            address: 4096,
            sizes: sizes.into(),
            strides: strides.into(),
            dtype,
            device: Device::cuda(0),
            owned: None,
        };
        Plan::new(&[descriptor]).expect("a plain tensor")
    }

    /// The chunks that `kernels/chunks.py` computes from a list: (address, rows, row length, row stride).
    fn walked(list: &WorkList) -> Vec<(i64, i64, i64, i64)> {
        let bytes = list.dtype.bytes() as i64;
        let chunk = |(number, &owner): (usize, &i32)| {
            let s = &list.segments[owner as usize * FIELDS..][..FIELDS];
            let local = number as i64 - s[6];
            let (row, column) = (local / s[8] * s[7], local % s[8] * s[9]);
            (s[0] + (row * s[3] + column) * bytes, s[7].min(s[1] - row), s[9].min(s[2] - column), s[3])
        };
        list.owners.iter().enumerate().map(chunk).collect()
    }

    #[test]
    fn chunks_are_those_of_the_plan() {
        for (sizes, strides) in [(&[1000][..], &[1][..]), (&[70, 30], &[40, 1]), (&[5, 900], &[1000, 1]), (&[50], &[2])]
        {
            let plan = planned(sizes, strides, DType::Bf16);
            let lists = work_lists(&plan.devices[0].sums, 256, true).expect("few chunks");
            let expected: Vec<_> = plan.devices[0]
                .sum_chunks(256)
                .map(|c| (c.address as i64, c.rows as i64, c.row_length as i64, c.row_stride as i64))
                .collect();
            let found = walked(&lists[0]);
            assert_eq!(found.len(), expected.len());
            for (a, b) in found.into_iter().zip(expected) {
                assert_eq!((a.0, a.1, a.2), (b.0, b.1, b.2));
                assert!(a.1 == 1 || a.3 == b.3, "the stride matters from two rows on");
            }
        }
    }

    #[test]
    fn complex_elements_are_two_reals() {
        let plan = planned(&[3, 10], &[20, 1], DType::C64);
        let lists = work_lists(&plan.devices[0].sums, 1024, true).expect("few chunks");
        assert_eq!(lists[0].dtype, DType::F32);
        assert_eq!(lists[0].segments[1..4], [3, 20, 40]);
    }

    #[test]
    fn digests_take_contiguous_elements_as_words() {
        let plans = [
            planned(&[7, 3], &[3, 1], DType::F16),
            planned(&[70, 3], &[3, 1], DType::C128),
            planned(&[9], &[1], DType::Bf16),
            planned(&[9], &[1], DType::F32),
        ];
        let number = |(tensor, plan): (usize, &Plan)| Segment { tensor: tensor as u32, ..plan.devices[0].scales[0] };
        let segments: Vec<_> = plans.iter().enumerate().map(number).collect();
        let lists = digest_lists(&segments, 256, |tensor| tensor != 2).expect("few chunks");
        assert_eq!(lists.iter().map(WorkList::dtype).collect::<Vec<_>>(), ["bfloat16", "float32"]);
        assert_eq!(lists.iter().map(|list| list.owners.len()).collect::<Vec<_>>(), [1, 5]);
        assert_eq!(lists[0].segments[1..6], [1, 21, 21, 1, 0]);
        assert_eq!(lists[1].segments[1..6], [1, 840, 840, 1, 1]);
        assert_eq!(walked(&lists[1])[3], (4096 + 4 * 768, 1, 72, 840));
    }

    #[test]
    fn one_list_for_each_type() {
        let (a, b) = (planned(&[7], &[1], DType::F16), planned(&[9], &[1], DType::F32));
        let segments = [a.devices[0].sums[0], b.devices[0].sums[0], a.devices[0].sums[0]];
        let lists = work_lists(&segments, 4, false).expect("few chunks");
        assert_eq!(lists.iter().map(|list| list.owners.len()).collect::<Vec<_>>(), [4, 3]);
        assert!(lists[0].same_as(&work_lists(&segments, 4, false).expect("few chunks")[0]));
        assert!(!lists[0].same_as(&lists[1]));
    }
}
