// The design to beat: a thread an output element, a divisibility test a tap. float32, NCDHW, contiguous; specialised at
// compile time on the kernel size (KD, KH, KW), stride (SD, SH, SW) and dilation (DD, DH, DW).
extern "C" __global__ void thread_per_output(const float* x, const float* weight, float* out, int n, int groups, int c_in,
                                             int c_out, int xd, int xh, int xw, int od, int oh, int ow, int pd, int ph,
                                             int pw) {
    const long long index = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (index >= (long long)n * groups * c_out * od * oh * ow) return;
    const int w = index % ow, h = index / ow % oh, d = index / ((long long)ow * oh) % od;
    const int channel = index / ((long long)ow * oh * od) % (groups * c_out);
    const int sample = index / ((long long)ow * oh * od * groups * c_out);
    const int group = channel / c_out;
    float sum = 0;
    for (int c = 0; c < c_in; ++c) {
        const float* plane = x + ((long long)sample * groups + group) * c_in * xd * xh * xw + (long long)c * xd * xh * xw;
        const float* taps = weight + ((long long)(group * c_in + c) * c_out + channel % c_out) * KD * KH * KW;
        for (int a = 0; a < KD; ++a) {
            const int id = d + pd - a * DD;
            if (id < 0 || id % SD || id / SD >= xd) continue;
            for (int b = 0; b < KH; ++b) {
                const int ih = h + ph - b * DH;
                if (ih < 0 || ih % SH || ih / SH >= xh) continue;
                for (int e = 0; e < KW; ++e) {
                    const int iw = w + pw - e * DW;
                    if (iw < 0 || iw % SW || iw / SW >= xw) continue;
                    sum += plane[((long long)(id / SD) * xh + ih / SH) * xw + iw / SW] * taps[(a * KH + b) * KW + e];
                }
            }
        }
    }
    out[index] = sum;
}
